"""The configuration section ``batch_job_sched_config``: its keys, where it stands, what is allowed.

It stands in the engine's ``additional_config``, either under ``scheduler_config`` or directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

SECTION: Final = "batch_job_sched_config"
PARENT: Final = "scheduler_config"


class ConfigError(ValueError):
    """The configuration is wrong; the message names the key, the value and what is allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        self.key = key
        self.value = value
        self.allowed = allowed
        super().__init__(f"{key}: got {value!r}, allowed: {allowed}")


BEYOND_THE_GUIDE_OFF: Final = {"order": "lpt", "look_ahead": False, "step_shaping": False}
"""What leaves the policy of the feature guide alone."""

Switch = Annotated[bool, Field(description="true or false")]
Count = Annotated[int, Field(ge=0, description="an integer of at least 0")]


class BatchJobConfig(BaseModel):
    """The settings of the scheduler; the defaults are the documented ones.

    >>> BatchJobConfig(max_jobs=10).reserve_max_blocks
    8
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: Switch = False
    max_jobs: Count = 20
    reserve_margin_blocks: Count = 2
    reserve_max_blocks: Count = 8
    low_available_tokens_threshold: Count = 4096
    short_decode_token_threshold: Count = 32
    ewma_alpha: Annotated[
        float,
        Field(gt=0, le=1, allow_inf_nan=False, description="a number above 0 and up to 1"),
    ] = 0.1
    order: Annotated[Literal["lpt", "blend"], Field(description="'lpt' or 'blend'")] = "lpt"
    look_ahead: Switch = True
    step_shaping: Switch = True
    guide_only: Switch = False

    @model_validator(mode="before")
    @classmethod
    def _switch_off(cls, section: dict[str, Any]) -> dict[str, Any]:
        """``guide_only`` switches off what goes beyond the guide, unless a key of its own says otherwise."""
        return {**BEYOND_THE_GUIDE_OFF, **section} if section.get("guide_only") is True else section

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.model_dump(exclude={"enabled"}).items())


def parse_section(section: Mapping[str, Any]) -> BatchJobConfig:
    """The settings that a configuration section states.

    Raises:
        ConfigError: for the first key that is unknown, of the wrong type or out of range.

    >>> parse_section({"max_jobs": -1})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    batchjob_scheduler.config.ConfigError: batch_job_sched_config.max_jobs: got -1, allowed: ...
    """
    try:
        return BatchJobConfig.model_validate(dict(section))
    except ValidationError as error:
        raise _explain(error) from None


def find_section(additional_config: object) -> Mapping[str, Any] | None:
    """The section within the engine's ``additional_config``, or None where there is none.

    Raises:
        ConfigError: if it is no object, stands in both places, or has a name that is almost its own.

    >>> find_section({"scheduler_config": {"batch_job_sched_config": {"enabled": True}}})
    {'enabled': True}
    >>> find_section({"batch_job_sched_config": {"enabled": True}})
    {'enabled': True}
    """
    if not isinstance(additional_config, Mapping):
        return None
    nested = additional_config.get(PARENT)
    if SECTION not in additional_config:
        _refuse_near_miss(additional_config, PARENT, "additional_config")
    places = [place for place in (nested, additional_config) if isinstance(place, Mapping)]
    found: list[Any] = [place[SECTION] for place in places if SECTION in place]
    if len(found) > 1:
        raise ConfigError(SECTION, found[1], f"one place: under {PARENT} or directly in additional_config")
    if not found:
        for place in places:
            _refuse_near_miss(place, SECTION, "additional_config")
        return None
    if not isinstance(found[0], Mapping):
        raise ConfigError(SECTION, found[0], "an object of keys and values")
    return found[0]


def requested(additional_config: object) -> BatchJobConfig | None:
    """The settings if ``additional_config`` switches the scheduler on, else None.

    ``enabled: false`` switches it off whatever else the section says.

    Raises:
        ConfigError: if the section is wrong.
    """
    section = find_section(additional_config)
    if section is None or section.get("enabled") is False:
        return None
    config = parse_section(section)
    return config if config.enabled else None


def settings_of(vllm_config: Any) -> BatchJobConfig:
    """The settings that an engine's configuration carries, for the scheduler in the engine's process.

    The plug-in leaves them at vLLM's ``scheduler_config``. Without it, with ``--scheduler-cls`` alone,
    they are what the section says, else the defaults.
    """
    carried = getattr(vllm_config.scheduler_config, SECTION, None)
    if isinstance(carried, BatchJobConfig):
        return carried
    section = find_section(vllm_config.additional_config)
    return BatchJobConfig() if section is None else parse_section(section)


def without_section(additional_config: object) -> object:
    """The engine's ``additional_config`` less our section.

    vllm-ascend would select its own scheduler for the section, and refuse keys that it does not know.

    >>> without_section({"scheduler_config": {"batch_job_sched_config": {"enabled": True}}, "other": 1})
    {'scheduler_config': {}, 'other': 1}
    """
    if find_section(additional_config) is None or not isinstance(additional_config, Mapping):
        return additional_config
    rest = {key: value for key, value in additional_config.items() if key != SECTION}
    if isinstance(rest.get(PARENT), Mapping):
        rest[PARENT] = {key: value for key, value in rest[PARENT].items() if key != SECTION}
    return rest


def _explain(error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    key = str(first["loc"][0])
    keys = list(BatchJobConfig.model_fields)
    if key not in keys:
        near = get_close_matches(key, keys, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return ConfigError(f"{SECTION}.{key}", first["input"], f"the keys {', '.join(keys)}{hint}")
    allowed = BatchJobConfig.model_fields[key].description or ""
    return ConfigError(f"{SECTION}.{key}", first["input"], allowed)


def _refuse_near_miss(place: Mapping[Any, Any], name: str, where: str) -> None:
    if name in place:
        return
    keys = [key for key in place if isinstance(key, str)]
    near = get_close_matches(name, keys, n=1, cutoff=0.85)
    if near:
        raise ConfigError(f"{where}.{near[0]}", place[near[0]], f"the name {name!r}")
