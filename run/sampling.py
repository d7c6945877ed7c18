"""Short samples of the model while it trains."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from data.vocabulary import DataError, load_codec
from model import GPT
from run.logger import Logger

TOKENS = 100  # per sample
TEMPERATURE, TOP_K = 0.8, 200  # also the defaults of sample.py


class Sampler:
    """Writes a short sample every `interval` iterations, to the console and the log.

    Every rank generates the sample, and rank 0 writes it. Nothing here is a collective: a read of a parameter only waits for
    an all-gather that all ranks have started. If rank 0 alone generated it, the times of the other ranks would include a wait.

    Args:
        interval: number of iterations from sample to sample; 0: no samples.
        model: the model, without the wrapper of `zero.build`. While it generates, it is in eval mode and is not compiled.
        meta: content of the dataset's `meta.pkl`, or None for GPT-2's vocabulary.
        seed: of every sample.

    Raises DataError if there will be samples and their vocabulary is not available.
    """

    def __init__(
        self, interval: int, model: GPT, meta: dict[str, Any] | None, autocast: AbstractContextManager[Any], seed: int
    ) -> None:
        self._interval, self._model, self._autocast, self._seed = interval, model, autocast, seed
        if not interval:
            return
        try:
            self._codec = load_codec(meta, model.config.vocab_size)
        except DataError as error:
            raise DataError(f"sample_interval={interval} cannot write samples: {error}; or use --sample_interval=0") from error
        self._prompt = self._codec.prompt("\n")

    def is_due(self, iteration: int) -> bool:
        """Return whether a sample is due before this iteration."""
        return self._interval > 0 and iteration % self._interval == 0

    def write(self, iteration: int, log: Logger) -> None:
        """Write a sample. Needs to be called on all ranks. Draws random numbers, after it has set the seed."""
        torch.manual_seed(self._seed)
        prompt = torch.tensor([self._prompt], device=self._model.lm_head.weight.device)  # (1, 1)
        self._model.eval()
        # eager: the model would be recompiled for every length
        with self._autocast, torch.compiler.set_stance("force_eager"):
            tokens = self._model.generate(prompt, TOKENS, TEMPERATURE, TOP_K, self._codec.tokens)
        self._model.train()
        text = self._codec.decode(tokens[0, len(self._prompt) :].tolist())
        log.log({"iter": iteration, "sample/text": text}, f"sample {iteration}:\n{text}\n---------------")
