"""Show the metrics of runs over each other, without an account: losses, memory, throughput, communication, checkpoints.

One page for the browser, which needs no network:
    $ python dashboard.py out-adamw out-torch out-sharded --html=runs.html

The same charts as pictures, one file per section:
    $ python dashboard.py out-adamw out-torch out-sharded --png=pictures

Save a workspace in wandb that compares the runs of a project, after wandb login:
    $ python dashboard.py --wandb out-stdlib-char

Each OUT_DIR is the out_dir of a run of train.py, or a copy of its files metrics.jsonl and run.json.
"""

import argparse
import json
import os
import sys
from contextlib import suppress
from typing import Any, NoReturn

from charts import workspace
from charts.differences import names
from charts.lines import Points, Run
from charts.page import page
from charts.runs import picture, sections
from charts.style import save
from distributed.exits import exit_on_wrong_input, guard_output
from run import out_folder
from run.logger import FACTS, METRICS_FILE, event_of
from zero.checkpoint.files import atomic_write


def read_metrics(out_dir: str) -> dict[str, Points]:
    """Return the curve of each metric of a run. Anything else in the file is skipped, such as half a line of a killed run.

    Raises:
        ValueError: if the folder has no metrics.jsonl, or if the file cannot be read.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    path = os.path.join(out_dir, METRICS_FILE)
    try:
        with open(path, "rb") as file:
            for line in file:
                event = event_of(line)
                for key, value in event.items() if event["iter"] >= 0 else ():
                    if key != "iter" and type(value) in (int, float) and abs(value) <= sys.float_info.max:
                        curves.setdefault(key, []).append((event["iter"], value))
    except FileNotFoundError as error:
        raise ValueError(f"there is no {path}; give the out_dir of a run of train.py") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; give a folder that can be read") from error
    return dict(curves)


def read_facts(out_dir: str) -> dict[str, Any]:
    """Return what run.json holds, or nothing if it cannot be read.

    The file of a killed run says "running", but nobody holds the lock of its folder. A copy of a folder does not tell.
    """
    facts = None
    with suppress(OSError, ValueError, RecursionError), open(os.path.join(out_dir, FACTS), "rb") as file:
        facts = json.load(file)
    if not isinstance(facts, dict):
        return {}
    if facts.get("state") == "running" and out_folder.is_held(out_dir) is False:
        facts["state"] = "killed"
    return facts


def read(out_dirs: list[str]) -> list[Run]:
    """Return the runs in these folders, with names that say what differs."""
    facts = [read_facts(out_dir) for out_dir in out_dirs]
    found = zip(names(facts, out_dirs), out_dirs, facts, strict=True)
    return [Run(name, out_dir, of, read_metrics(out_dir)) for name, out_dir, of in found]


def draw(out_dirs: list[str], html: str | None, png: str | None) -> None:
    """Read the runs in these folders, write the page to a file and the pictures into a folder, and print where they are.

    Raises:
        ValueError: if the runs have no figures yet.
    """
    runs = read(out_dirs)
    drawn = sections(runs)
    if not drawn:
        raise ValueError(f"there are no figures yet in {', '.join(out_dirs)}; try again later")
    if html:
        os.makedirs(os.path.dirname(html) or ".", exist_ok=True)
        with atomic_write(html) as temporary, open(temporary, "w", encoding="utf-8") as file:
            file.write(page(runs, drawn))
        print(f"the page is in {html}")
    if png:
        for name, row in drawn.items():
            save(picture(name, row, runs), os.path.join(png, f"{name.lower()}.png"))
        print(f"the pictures are in {png}")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as in the other scripts."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help shows examples")


def arguments() -> argparse.Namespace:
    """Return the parsed command line. Raise ValueError if it has nothing to draw or nowhere to write."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dirs", nargs="*", type=os.path.normpath, metavar="OUT_DIR", help="folder of a run")
    parser.add_argument("--html", metavar="FILE", help="write a page for the browser")
    parser.add_argument("--png", metavar="DIR", help="write pictures into a folder")
    parser.add_argument("--wandb", action="store_true", help="save a workspace in wandb")
    parser.add_argument("--project", help="project of wandb, by default that of the first OUT_DIR")
    parser.add_argument("--entity", help="user or team of wandb, by default that of the login")
    args = parser.parse_args()
    if not args.out_dirs and (args.html or args.png or not args.wandb):
        raise ValueError("no OUT_DIR is given; give the out_dir of at least one run of train.py")
    for out_dir in args.out_dirs:
        if not os.path.isdir(out_dir):
            raise ValueError(f"there is no folder {out_dir}; give the out_dir of a run of train.py")
    if not args.html and not args.png and not args.wandb:
        raise ValueError("nothing to write is given; add --html=FILE or --png=DIR")
    if args.html and (not args.html.endswith(".html") or os.path.isdir(args.html)):
        raise ValueError(f"html={args.html} must be the path of a file that ends with .html")
    if args.png and os.path.isfile(args.png):
        raise ValueError(f"png={args.png} is a file; give the path of a folder")
    return args


def main() -> None:
    with exit_on_wrong_input():
        args = arguments()
        if args.wandb:
            project = args.project or next((read_facts(out_dir).get("wandb_project") for out_dir in args.out_dirs), None)
            if project is None:
                raise ValueError("--wandb needs --project=NAME, or the OUT_DIR of a run of the project")
            print(f"the workspace is at {workspace.publish(project, args.entity)}")
        if args.html or args.png:
            draw(args.out_dirs, args.html, args.png)


if __name__ == "__main__":
    guard_output(goes_on=False)
    main()
