"""The settings of one patched model."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from .options import OPTIONS, OptionError


def _default(name: str) -> Any:
    return OPTIONS[name].default


@dataclass(frozen=True, kw_only=True)
class ToMeConfig:
    """Validated settings: every option of :data:`tome_nodes.settings.options.OPTIONS`.

    ``ratio``, ``sx``, ``sy``, ``use_rand``, ``max_downsample`` and the ``merge_*`` switches have
    their meaning in section 4 of arXiv 2303.17604 and its code, except that ``max_downsample`` may
    be ``"auto"``. The weight of merged tokens (``proportional_attn``) is that of Bolya et al., ICLR
    2023: the logarithm of their number is added to the logits.

    Raises:
        OptionTypeError: an option has the wrong type; it is a ``TypeError``.
        OptionError: an option is out of range, or two of them contradict each other; it is a
            ``ValueError``. The message names the option, its value and what is allowed.
    """

    ratio: float = _default("ratio")
    start_percent: float = _default("start_percent")
    end_percent: float = _default("end_percent")
    seed: int = _default("seed")
    backend: str = _default("backend")
    strategy: str = _default("strategy")
    scope: str = _default("scope")
    attn_tokens: str = _default("attn_tokens")
    max_downsample: int | Literal["auto"] = _default("max_downsample")
    merge_attn: bool = _default("merge_attn")
    merge_crossattn: bool = _default("merge_crossattn")
    merge_mlp: bool = _default("merge_mlp")
    kv_ratio: float = _default("kv_ratio")
    ratio_end: float = _default("ratio_end")
    sx: int = _default("sx")
    sy: int = _default("sy")
    st: int = _default("st")
    use_rand: bool = _default("use_rand")
    reuse_steps: int = _default("reuse_steps")
    refresh_steps: int = _default("refresh_steps")
    min_tokens: int = _default("min_tokens")
    proportional_attn: bool = _default("proportional_attn")

    def __post_init__(self) -> None:
        for field in fields(self):
            OPTIONS[field.name].check(getattr(self, field.name))
        if self.sx * self.sy == 1:
            raise OptionError(
                "sx",
                "sx=1 with sy=1 is not allowed: a cell of one token has nothing to merge; "
                "sx or sy must be at least 2",
            )
        if self.start_percent > self.end_percent:
            raise OptionError(
                "start_percent",
                f"start_percent={self.start_percent} is not allowed: it must not be greater than "
                f"end_percent={self.end_percent}",
            )

    @property
    def merges_nothing(self) -> bool:
        """Whether no ratio is above 0."""
        return max(self.ratio, self.ratio_end, self.kv_ratio) <= 0
