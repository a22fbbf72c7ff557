"""The part of a sampling run in ComfyUI that merges tokens.

The wrapper of a model evaluation puts ``forward`` overrides on the transformer blocks, and takes
them off again.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Lock
from typing import Any

import torch
from comfy.model_management import InterruptProcessingException
from comfy.patcher_extension import WrapperExecutor
from torch import Tensor, nn

from .. import reasons
from ..merging.deep_blocks import DeepBlocks
from ..merging.engine import MakeStrategy
from ..merging.evaluation import Evaluation
from ..merging.model import unwrapped
from ..merging.model_run import ModelRun, why_stopped
from ..run.record import RunRecord
from ..strategies.plan import Grid
from . import comfy_compiler, host_checks, neighbours
from .comfy_run import ComfyRun
from .model_report import ModelReport
from .models import family_of
from .models.base import ComfyFamily
from .models.unet import deep_blocks, has_patches
from .neighbours import KEY
from .shallow_call import shallow_control, shallow_options
from .shallow_part import ShallowPart

# Not ``__name__``: ComfyUI names the package after its folder.
log = logging.getLogger("tome_nodes")


def apply_model(
    executor: WrapperExecutor,
    x: Tensor,
    t: Tensor,
    c_concat: Tensor | None = None,
    c_crossattn: Tensor | None = None,
    control: Any = None,
    transformer_options: dict[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Wrap one model evaluation."""
    options = {} if transformer_options is None else transformer_options

    def call(given: dict[str, Any] = options, added: Any = control) -> Tensor:
        answer: Tensor = executor(
            x, t, c_concat, c_crossattn, _copied(added), given, *args, **kwargs
        )
        return answer

    merging: MergingPart | None = options.get(KEY)
    if merging is None:
        return call()
    # With sound, the latent is the first of what is packed into ``x``.
    packed = kwargs.get("latent_shapes")
    shape = packed[0] if packed else x.shape
    conditions = kwargs | {"control": control}
    return merging.evaluate(executor.class_obj, shape, conditions, t, options, call)


class MergingPart:
    """Merges tokens in one sampling run, which may evaluate several models in several threads."""

    def __init__(
        self,
        comfy_run: ComfyRun,
        make_strategy: MakeStrategy,
        with_details: bool,
        shallow: ShallowPart | None = None,
    ):
        """Prepare a run.

        ``shallow`` says which evaluations are shallow; None if none is. ``with_details`` is whether
        to record the run in detail.
        """
        self._comfy_run = comfy_run
        self._run = comfy_run.run
        self._make_strategy = make_strategy
        self._with_details = with_details
        self._shallow = shallow
        self._known: dict[nn.Module, tuple[ComfyFamily, ModelRun] | None] = {}
        self._deep: dict[nn.Module, DeepBlocks] = {}
        self._reports: dict[type, tuple[ModelReport, ModelRun, Any]] = {}
        self._others: set[str] = set()
        self._lock = Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MergingPart":
        # Another node may copy the transformer options, which hold this, for every evaluation.
        return self

    @contextmanager
    def installed(self, model_options: Mapping[str, Any]) -> Iterator[None]:
        """Take part in a run, whose model options these are, until ComfyUI drops them."""
        options = model_options["transformer_options"]
        options[KEY] = self
        shallow = nullcontext() if self._shallow is None else self._shallow.installed()
        with comfy_compiler.switched_off(options), shallow:
            yield

    def evaluate(
        self,
        model: Any,
        shape: Sequence[int],
        conditions: Mapping[str, Any],
        t: Tensor,
        options: dict[str, Any],
        call: Callable[..., Tensor],
    ) -> Tensor:
        """Evaluate a BaseModel of ComfyUI by ``call``, merging tokens or shallowly.

        ``shape`` is that of the latent, or of its part that is evaluated, ``conditions`` are the
        arguments of the model by name besides the latent, ``t`` is the noise levels of the samples,
        and ``options`` are the transformer options. ``call`` may be given other options and another
        control.
        """
        network = unwrapped(model.diffusion_model)
        steps = self._comfy_run.steps
        level = steps.read(t)
        with self._lock:
            steps.begin_evaluation(t, level)
            if network not in self._known:
                self._known[network] = self._met(network, model, shape, t.device)
            known = self._known[network]
            step, off = self._run.index, self._run.why_off
        if known is None:
            return call()
        family, model_run = known
        others = neighbours.modules_in(options)
        self._others |= others
        obstacle = family.obstacle(network, conditions) or neighbours.obstacle_in(others)
        if torch.is_grad_enabled() and _recomputes(network):
            obstacle = reasons.RECOMPUTED
        grid, dtype = family.grid(network, shape), model.get_dtype_inference()
        evaluation = Evaluation(
            step=step,
            progress=step / max(self._run.total_steps - 1, 1),
            picks=step,
            latent=grid,
            device=t.device,
            dtype=dtype,
            off=off,
            obstacle=obstacle,
            may_be_patched=has_patches(options),
        )
        shallow, deep = self._shallow, self._deep.get(network)
        if shallow is None or deep is None:
            return model_run.evaluate(call, evaluation)
        keys = shallow.keys_of(network, options, shape, t.device)
        if keys is None:
            return model_run.evaluate(call, evaluation)
        given = answer = None
        try:
            given, blocks = shallow.shallow_run.given(keys), len(network.output_blocks)
            if given is not None:
                control = shallow_control(conditions["control"], blocks)
                own = partial(call, shallow_options(options, blocks), control)
                return model_run.evaluate_shallow(own, evaluation, deep, given)
            may_free = shallow.shallow_run.keeps_features
            answer, came = model_run.evaluate_watched(call, evaluation, deep, may_free)
            shallow.shallow_run.keep(keys, came)
            return answer
        except InterruptProcessingException:
            raise
        except Exception as error:
            why = why_stopped(error, network, given is not None)
            if why is None:
                raise
            given = came = None
        # Not in the except block, where the traceback keeps the tensors of the evaluation.
        shallow.stop(why)
        return model_run.evaluate(call, evaluation) if answer is None else answer

    def _met(
        self, network: nn.Module, model: Any, shape: Sequence[int], device: torch.device
    ) -> tuple[ComfyFamily, ModelRun] | None:
        """The family of a model that is new in this run, and its evaluations.

        None, and a warning in the log, if it cannot merge. Models of one class are deep clones of
        each other, and share a report.
        """
        is_first = not self._reports
        try:
            family = family_of(network)
            changed = None if is_first else family.changed_part(network)
            obstacle = changed and f"{host_checks.VERSION} has another {changed}"
        except ValueError as error:
            obstacle = str(error)
        if obstacle is not None:
            log.warning("[ToMe] a second model of this run stays unmerged: %s", obstacle)
            return None
        kind = type(network)
        if kind in self._reports:
            report = self._reports[kind][0]
        else:
            latent = Grid(*shape[-2:])
            report = ModelReport(self._run, latent, device, is_first and self._with_details)
        config = family.in_effect(self._run.config)
        run = ModelRun(config, family, network, self._make_strategy, report)
        self._reports.setdefault(kind, (report, run, model))
        if self._shallow is not None and (deep := deep_blocks(network)) is not None:
            self._deep[network] = deep
        return family, run

    def finish(self) -> list[RunRecord]:
        """The records of the run, one for each class of model; none if nothing was sampled."""
        if not self._known and self._comfy_run.steps.done:
            return [self._run.unseen(self._comfy_run.name)]
        others = {neighbours.short(other) for other in self._others}
        gpu_waited = self._comfy_run.steps.gpu_waited
        return [
            report.finish(type(model.model_config).__name__, run, others, gpu_waited)
            for report, run, model in self._reports.values()
        ]


def _copied(control: Any) -> Any:
    """What a ControlNet adds, for one call: the model takes it out of the lists."""
    if not isinstance(control, dict):
        return control
    return {name: [*added] if isinstance(added, list) else added for name, added in control.items()}


def _recomputes(network: nn.Module) -> bool:
    """Whether ComfyUI's node Train LoRA runs modules of a network again for their gradients."""
    return any("org_forward" in vars(module) for module in network.modules())
