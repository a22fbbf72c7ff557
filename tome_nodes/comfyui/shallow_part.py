"""The part of a sampling run in ComfyUI that makes some evaluations of a UNet shallow.

Which evaluations are whole is planned before the first shallow one. In the others, only the first
input block and the last output block run, and what comes up from the blocks between goes on from
the last whole evaluations.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from comfy.patcher_extension import WrapperExecutor
from torch import Tensor, nn

from .. import reasons
from ..skipping.plan import LEAST_SNR
from ..skipping.shallow_run import ShallowRun
from ..skipping.steps import log_snr, log_snrs
from .comfy_run import ComfyRun
from .conditions import conditions_of
from .guided_answers import is_cached, options_of, place_in, wrapped
from .shallow_call import Options


class ShallowPart:
    """Tells a :class:`ShallowRun` of the evaluations of one sampling run.

    Attributes:
        shallow_run: decides which of them are shallow, and keeps features for them.
    """

    def __init__(self, comfy_run: ComfyRun):
        run = comfy_run.run
        self.shallow_run = run.skipping = ShallowRun(run.config.shallow_ratio, comfy_run.sampler)
        self._comfy_run = comfy_run
        self._run = run
        self._latent: Tensor | None = None
        self._where: Hashable = None
        self._answers = 0
        self._first_of_step: list[int] = []
        self._is_planned = False
        self._conditions: Hashable = None
        self._place = 0.0
        self.shallow_run.obstacle = self._obstacle_before()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShallowPart":
        # Another node may copy the transformer options, whose wrappers hold this.
        return self

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take part in the run; afterwards, nothing is kept of it."""
        try:
            with wrapped(self._comfy_run.guider, self.predict_noise, self.calc_cond_batch):
                yield
        finally:
            self.shallow_run.clear()
            self._comfy_run.latents.clear()
            self._latent = None

    def predict_noise(self, executor: WrapperExecutor, *args: Any, **kwargs: Any) -> Any:
        """Wrap a guided answer, for which the model may be called several times."""
        with self._comfy_run.steps.answering(args[1]):
            if self.shallow_run.obstacle is not None:
                return executor(*args, **kwargs)
            self._latent = args[0]
            self._begin(args[0], options_of(args, kwargs))
            answer = executor(*args, **kwargs)
            self._comfy_run.latents.note(answer)
            return answer

    def calc_cond_batch(
        self, executor: WrapperExecutor, model: Any, conds: Any, x_in: Tensor, *others: Any
    ) -> Any:
        """Wrap the answers to some conditions, in a window of the latent or in all of it."""
        if self._latent is None or self.shallow_run.obstacle is not None:
            return executor(model, conds, x_in, *others)
        self._where = place_in(x_in, self._latent)
        answers = executor(model, conds, x_in, *others)
        if self._where is None:
            self._comfy_run.latents.note_parts(answers)
        return answers

    def stop(self, why: reasons.Reason) -> None:
        """Run the rest whole, and drop what is kept: memory may be short."""
        self.shallow_run.stop(why)
        self._comfy_run.latents.clear()

    def keys_of(
        self, network: nn.Module, options: Options, shape: Sequence[int], device: torch.device
    ) -> list[Hashable] | None:
        """What tells each condition of a call of a model from the others of its answer, in order.

        Other nodes evaluate a condition several times in an answer, in areas or without a part.

        Args:
            network: the model that is called.
            options: the transformer options of the call.
            shape: of the latent that the model gets, ``[samples, channels, height, width]``.
            device: the device that it is on.

        Returns:
            The keys; None if the call is the plain one, of which nothing is kept.
        """
        sides = options.get("cond_or_uncond") or [0]
        # Where there are areas, the host gives both prompts one name.
        uuids = options.get("uuids") or [None] * len(sides)
        names = [(network, self._where, *name) for name in zip(uuids, sides, strict=False)]
        # Another node may call the model for a part of them.
        return self.shallow_run.keys_of(names, shape, device)

    def _begin(self, latent: Tensor, options: Mapping[str, Any]) -> None:
        """Begin a guided answer: decide whether it is shallow."""
        index, done = self._answers, self._comfy_run.steps.done
        self._answers += 1
        while len(self._first_of_step) <= done:
            self._first_of_step.append(index)
        if not self._is_planned and done >= 2:
            # Two steps have told how many evaluations a step has.
            evaluations = self._first_of_step[2] - self._first_of_step[1]
            *others, last = log_snrs(self._comfy_run.steps.schedule[:-1], self._comfy_run.is_flow)
            # All samplers evaluate the step that leaves no noise once.
            once = self._comfy_run.steps.schedule[-1] == 0
            levels = [level for level in others for _ in range(evaluations)]
            self.shallow_run.plan([*levels, *[last] * (1 if once else evaluations)])
            self._is_planned = True
        noise, is_active = self._run.noise, self._run.is_active
        conditions = conditions_of(self._comfy_run.guider, options, noise)
        is_new, self._conditions = conditions != self._conditions, conditions
        if is_new:
            self.shallow_run.clear()
        self._place = log_snr(noise, self._comfy_run.is_flow) if noise > 0 else self._place
        self.shallow_run.begin(index, self._place, may_be_shallow=is_active and not is_new)
        self.shallow_run.follow(self._comfy_run.latents.begin(latent, noise))

    def _obstacle_before(self) -> reasons.Reason | None:
        """Why no evaluation can be shallow, as far as can be told before the run."""
        schedule = self._comfy_run.steps.schedule
        why = self._run.span.why_none(schedule[:-1])
        why = why or self.shallow_run.too_short(self._run.total_steps)
        if why is not None:
            return why
        if any(after >= before for before, after in pairwise(schedule)):
            return reasons.NOISE_RISES
        if schedule[-1] == 0 and log_snr(schedule[-2], self._comfy_run.is_flow) < LEAST_SNR:
            return reasons.UNEVEN
        options = self._comfy_run.guider.model_options
        return reasons.CACHE if is_cached(options) else None
