"""What accompanies training, and when. train.py computes; a `Run` calls the watchers: one method per moment of an iteration."""

import atexit
import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from data.dataset import Dataset
from data.vocabulary import DataError
from distributed.exits import exit_on_wrong_input, finish, print_error
from distributed.launch import Launch
from distributed.machine import environment, is_slow_on_cpu
from distributed.ranks import print0
from distributed.signals import Action, Signals
from distributed.watchdog import Watchdog, position
from forecast.modes import without_effect
from forecast.prediction import Workload
from model import GPT
from run.checkpoints import Checkpoints, State
from run.guard import Guard
from run.logger import Logger
from run.memory_meter import Memory, describe
from run.meter import Iteration, Meter
from run.profiling import Profiler
from run.progress import Progress
from run.rank_checks import check_gradients
from run.sampling import Sampler
from run.summary import is_reached
from zero import ShardedGradScaler, ShardedOptimizer
from zero.flags import Flags
from zero.sharded_state import partition


class Run:
    """Calls its watchers in order at each moment of a run. No watcher uses another one, unless its constructor takes it.

    A GPU computes while the host goes on. The host reads the figures of an iteration in `read_figures`, when it has given the
    next forward to the GPU, or before an evaluation, a sample or a save.

    Construct it, and call every method, on all ranks.

    Args:
        config: the settings of train.py.
        device, dtype: what `start` and `machine.resolve` returned for them.
        micro_steps: of this rank per iteration.
        tokens_per_iter: of all ranks together.
    """

    def __init__(
        self, config: dict[str, Any], launch: Launch, device: torch.device, dtype: str, micro_steps: int, tokens_per_iter: int
    ) -> None:
        self.config, self.launch, self.device, self.dtype = config, launch, device, dtype
        self.micro_steps, self.tokens_per_iter = micro_steps, tokens_per_iter
        self.state = State()  # which train.py counts
        if is_slow_on_cpu(device, dtype):
            setting = "dtype" if config["param_dtype"] in ("auto", "float32") else "param_dtype"
            print0(f"note: this CPU has no {dtype} instructions; --{setting}=float32 will be faster")
        self.progress = Progress(config["max_iters"], launch.rank)
        Watchdog(config["dist_timeout_s"])  # ends the ranks if they hang
        self.profiler = Profiler(os.path.join(config["out_dir"], "profile"), launch.rank, device, config["profile"])
        self.checkpoints = Checkpoints(config)
        self._reads_later = device.type == "cuda"
        self._untimed_from = 0.0  # seconds, when the last block that is not timed began
        self._unread: Iteration | None = None  # the last one, if its figures are not read yet
        self._action = Action.CONTINUE  # of all ranks, as the iteration begins, or after its evaluation
        self._best_at = -1  # the iteration of the best evaluation
        self._reached = False  # whether the last evaluation has reached `stop_at_val_loss`

    # -- set-up --------------------------------------------------------------------------------------------------------

    @contextmanager
    def stage(self, description: str) -> Iterator[None]:
        """Run a part of the set-up: all ranks end if any of them raises for wrong input. A terminal shows the description."""
        with exit_on_wrong_input(), self.progress.task(description):
            yield

    def attach(
        self,
        raw_model: GPT,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: ShardedGradScaler,
        autocast: AbstractContextManager[Any],
        data: Dataset,
    ) -> None:
        """Begin to watch what train.py has made, and claim `out_dir`. Call when the model and its optimizer exist."""
        config, state, world_size = self.config, self.state, self.launch.world_size
        flags = Flags.of(config)
        self.raw_model, self.model, self.optimizer = raw_model, model, optimizer
        print0(describe(optimizer, without_effect(flags, world_size)))
        self.first_iter = state.iter_num
        will_train = not config["eval_only"] and state.iter_num <= config["max_iters"]
        with self.stage("reading the vocabulary"):
            bytes_per_token = data.bytes_per_token("val") if self.launch.rank == 0 else None
            interval = config["sample_interval"] if will_train else 0
            self.sampler = Sampler(interval, raw_model, data.meta, autocast, config["seed"])
        with self.stage("starting the log"):
            self.checkpoints.claim()
            usual, name = config["optimizer"], type(partition(optimizer).inner).__name__
            facts = {
                "implementation": flags.implementation(world_size),
                "optimizer": usual if name.lower() == usual else name,  # a class of the reader's own
                "world_size": world_size,
                "micro_steps": self.micro_steps,
                "parameters": raw_model.num_params(),
                "train_tokens": len(data.tokens["train"]),
                "from_tokens": self._tokens(),
                "val_bytes_per_token": bytes_per_token,
                "dtype": self.dtype,
                **environment(self.device),
                **{key: value for key, value in asdict(raw_model.config).items() if key in config},  # perhaps the checkpoint's
            }
            resume_at = state.iter_num if self.checkpoints.loaded_from else None
            self.log = Logger(config["out_dir"] if will_train else None, resume_at, config | facts, state.wandb_run_id)
            atexit.register(self.log.finish, "failed", "ended by an error, see the traceback")  # does nothing after `finish`
            state.wandb_run_id = self.log.wandb.id or state.wandb_run_id
        how = raw_model.activation_checkpointing, raw_model.loss_chunk, config["compile"]
        workload = Workload(raw_model.config, config["batch_size"], self.dtype, self.device.type, *how)
        self.memory = Memory(self.log, model, optimizer, workload, flags, self.micro_steps)
        if isinstance(optimizer, ShardedOptimizer):
            self.profiler.wait = optimizer.synchronize
        of_run = self.tokens_per_iter, raw_model.flops_per_token(), state.iter_num, config["max_iters"], state.elapsed_s
        self.meter = Meter(self.memory, self.dtype, *of_run)
        self.signals = Signals()
        self.guard = Guard(optimizer, scaler, config["max_nonfinite"], self.log.alert)
        if state.iter_num > config["max_iters"]:
            beyond = f"the checkpoint is at iteration {state.iter_num}, beyond max_iters={config['max_iters']}"
            print0(f"nothing to train: {beyond}; use a larger one")
        if will_train:
            self.memory.announce(state.iter_num)
        position.begin_iteration(state.iter_num)  # from here on, the watchdog ends a rank that hangs

    # -- an iteration --------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Call first in an iteration: all ranks agree on `must_save` and `must_stop`. A signal or a failure on one counts."""
        is_end, failed = self.state.iter_num > self.config["max_iters"], self.checkpoints.report(self.log) or self.guard.failed
        due = Action.CONTINUE if self.guard.consecutive else self.checkpoints.action_due(self.state.iter_num, is_end)
        self._action = self.signals.agree(Action.FAIL if failed else due)
        position.begin_iteration(self.state.iter_num)

    @property
    def must_save(self) -> bool:
        """Whether a checkpoint is due before this iteration: at the end, because of a signal or of an evaluation."""
        is_saved = self.checkpoints.read_only or self.checkpoints.newest == self.state.iter_num
        return self._action in (Action.SAVE, Action.SAVE_AND_STOP) and not is_saved

    @property
    def must_stop(self) -> bool:
        """Whether the run ends early: by a signal, `stop_at_val_loss`, or a watcher that failed, perhaps while it saved."""
        return self._action in (Action.SAVE_AND_STOP, Action.FAIL) or self.guard.failed or self._reached

    def begin_step(self) -> None:
        """Call when the learning rate is set, and an evaluation is over. Draws random numbers."""
        if self.sampler.is_due(self.state.iter_num):
            with self.untimed("sampling", patient=True):
                self.sampler.write(self.state.iter_num, self.log)
        self.meter.begin_iteration(self.state.iter_num, self._is_logged())

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure a part of an iteration: "forward", "data", "backward", "clip" or "update"."""
        return self.meter.phase(name)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """End this rank, and so all, with one line if a token file has become unreadable. Others may be at another line."""
        try:
            yield
        except DataError as error:
            print_error(str(error), is_root_cause=True)
            self.log.finish("failed", f"ended before iteration {self.state.iter_num:,}: {error}")
            os._exit(2)

    def read_figures(self) -> None:
        """Log, print and judge the last iteration, unless this is done. Call when the device has the next forward to do."""
        if self._unread is None:
            return
        ended, self._unread = self._unread, None
        ended.figures.read()  # before the stopwatches: with their events, the watchdog names a collective that hangs
        if ended.lap is not None and self.launch.rank == 0:
            self.meter.log_iteration(ended)
        self.guard.report(ended.number, ended.figures)

    def skip_if_not_finite(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Make the update of this iteration do nothing if one of these scalars is inf or nan on any rank.

        `loss` is of this rank, `grad_norm` of all ranks together. Call when the gradients are clipped.
        """
        self.guard.check(loss, grad_norm)  # waits for all ranks
        self.meter.measure_memory("before step")

    def after_update(self) -> None:
        """Call when the weights are updated, and the gradients still exist."""
        if self.state.iter_num == self.first_iter:
            with exit_on_wrong_input():
                check_gradients(self.model)
        if self.state.iter_num >= self.first_iter + 2:
            self.memory.compare(self.state.iter_num)  # once, as soon as there is optimizer state

    def end_iteration(self, lr: float) -> None:
        """Call when the gradients are dropped."""
        iteration, self.state.elapsed_s = self.state.iter_num, self.meter.elapsed_s()
        self.meter.measure_memory("after step")
        is_evaluated = (iteration + 1) % self.config["eval_interval"] == 0
        if self._is_logged() or is_evaluated or self.device.type == "cpu":
            figures, tokens = self.guard.figures(), self._tokens()
            self._unread = self.meter.end_iteration(iteration, figures, lr, tokens, self._is_logged())
        if not self._reads_later or is_evaluated or iteration == self.config["max_iters"]:
            self.read_figures()
        self.progress.update(iteration, self.log.summary.last)
        if self.profiler.step():
            self.meter.restart()

    # -- evaluations and checkpoints -----------------------------------------------------------------------------------

    @contextmanager
    def untimed(self, doing: str, patient: bool = False) -> Iterator[None]:
        """Run what does not count as time of an iteration. `patient`: it may take longer than the timeout."""
        self.read_figures()
        self._untimed_from = time.perf_counter()
        with position.at(doing, patient):
            yield
        self.meter.restart()

    def after_evaluation(self, losses: dict[str, float], lr: float) -> None:
        """Log the losses by split. With them, `must_save` and `must_stop` may become true."""
        seconds = time.perf_counter() - self._untimed_from
        self.meter.log_evaluation(self.state.iter_num, losses, lr, seconds, self._tokens())
        if self.checkpoints.read_only:
            return
        if self.guard.consecutive or not all(map(math.isfinite, losses.values())):
            self.log.warn("not saved for this evaluation: the loss or the last gradients are not finite")
            return
        if is_best := losses["val"] < self.state.best_val_loss:
            self._best_at, self.state.best_val_loss = self.state.iter_num, losses["val"]
        self._reached = is_reached(self.config, losses["val"])
        due = self.checkpoints.action_due(self.state.iter_num, is_end=self._reached)  # perhaps before the first iteration
        if (is_best or self.checkpoints.always) and self.state.iter_num > self.first_iter:
            due = Action.SAVE
        self._action = max(self._action, due)

    def save(self, values: dict[str, Any]) -> None:
        """Write a checkpoint with these values and the state of the run, unless the guard says that the run has failed."""
        with self.untimed("saving the checkpoint", patient=True), self.progress.task("saving the checkpoint"):
            self.guard.report(self.state.iter_num - 1)
            if not self.guard.failed:
                is_best = self._best_at == self.state.iter_num
                self.checkpoints.save(self.raw_model, self.optimizer, {**values, **vars(self.state)}, is_best)

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> NoReturn:
        """End all ranks: exit code 0, or 1 if the training or its last checkpoint has failed."""
        self.read_figures()
        self.guard.report(self.state.iter_num - 1)
        must_fail = self.checkpoints.report(self.log, at_end=True) or self.guard.failed
        failed = self.signals.agree(Action.FAIL if must_fail else Action.CONTINUE) == Action.FAIL
        if failed:
            self.checkpoints.explain_failure(diverged=self.guard.failed)
        self.profiler.finish()
        self.progress.close()
        end = self.state.iter_num
        if not (failed or self.checkpoints.read_only or self.checkpoints.newest == end):
            last = self.checkpoints.newest
            which = "there is no checkpoint" if last is None else f"the last checkpoint is of iteration {last}"
            self.log.warn(f"{which}: later losses or gradients are not finite")
        self.log.log({"iter": end, "iter/tokens": self._tokens(), "time/elapsed_s": self.meter.elapsed_s()})
        stopped = f"stopped by a signal before iteration {end}"
        if failed:
            self.log.finish("failed", f"failed before iteration {end:,}, see the last warning")
        elif self._action == Action.SAVE_AND_STOP:
            self.log.finish("stopped", stopped)
            print0(f"{stopped}; continue with --init_from=resume")
        else:
            self.log.finish("ended", f"done, {end:,} iterations")
        finish(int(failed))

    def _tokens(self) -> int:
        """Return the number of tokens that all ranks together have seen."""
        return self.state.data_position * self.config["block_size"]

    def _is_logged(self) -> bool:
        return self.state.iter_num % self.config["log_interval"] == 0
