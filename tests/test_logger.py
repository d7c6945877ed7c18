"""metrics.jsonl holds whole lines, whatever happened to the run that wrote it."""

import json

from logger import Logger


def make(folder, resume):
    return Logger(str(folder), resume, wandb_log=False, project="", name="", config={})


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_goes_on_after_the_last_whole_line(tmp_path):
    make(tmp_path, resume=False).log({"iter": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iter": 2, "los')  # a kill
    logger = make(tmp_path, resume=True)
    assert logger.file.tell() == len('{"iter": 1}\n'), "where the next line goes back to if the disk is full"
    logger.log({"iter": 2})
    logger.log({"iter": 3})
    assert lines(tmp_path) == [{"iter": 1}, {"iter": 2}, {"iter": 3}]
    make(tmp_path, resume=False).log({"iter": 0})
    assert lines(tmp_path) == [{"iter": 0}]


class Full:
    """A file on a disk with room for `room` bytes."""

    name = "metrics.jsonl"

    def __init__(self, room):
        self.room, self.content = room, b""

    def tell(self):
        return len(self.content)

    def write(self, line):
        taken = line[: self.room - len(self.content)]
        if not taken:
            raise OSError("No space left on device")
        self.content += taken
        return len(taken)

    def truncate(self, size):
        self.content = self.content[:size]


def test_a_full_disk_is_mentioned_once_and_tears_no_line(tmp_path, capsys):
    logger = make(tmp_path, resume=False)
    logger.file = Full(room=30)
    for iteration in range(10, 15):
        logger.log({"iter": iteration})  # 13 bytes
    assert logger.file.content == b'{"iter": 10}\n{"iter": 11}\n'
    assert capsys.readouterr().out.count("figures are missing from metrics.jsonl") == 1
    logger.file.room = 100
    logger.log({"iter": 15})
    assert logger.file.content.endswith(b'11}\n{"iter": 15}\n')
