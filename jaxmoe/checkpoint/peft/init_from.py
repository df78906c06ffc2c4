# SPDX-License-Identifier: Apache-2.0
"""Adapters that a run starts from, `lora.init_from`: a PEFT folder that must fit the config.

Next: jaxmoe/checkpoint/peft/read.py reads the files.
"""

import math
from pathlib import Path

from jaxmoe.checkpoint.base import base_folder, portable_base_name
from jaxmoe.checkpoint.peft.config import read_adapter_config
from jaxmoe.checkpoint.peft.read import PeftAdapter, read_adapter
from jaxmoe.config import Config, ConfigError
from jaxmoe.config.lora import ATTENTION, EXPERTS
from jaxmoe.shapes import Params


def load_initial_adapters(cfg: Config) -> Params:
    """The adapters of `lora.init_from`, numpy float32; {"layers": {}} without the setting.

    Raises: ConfigError as `read_adapter` does, or if ranks, alphas, targets or the base's name
        differ from the config's.
    """
    if not cfg.lora.init_from:
        return {"layers": {}}
    directory = Path(cfg.lora.init_from)
    adapter = read_adapter(directory, cfg.model)
    _check_base_name(cfg, directory)
    layer = next(iter(adapter.adapters["layers"].values()))
    ranks = {name: layer[name].a.shape[-2] for name in adapter.scales}
    same_scales = all(
        math.isclose(scale, cfg.lora.scales.get(name, 0.0), rel_tol=1e-6)
        for name, scale in adapter.scales.items()
    )
    if ranks != cfg.lora.ranks or not same_scales:
        stored = _describe(ranks, adapter.scales)
        configured = _describe(cfg.lora.ranks, cfg.lora.scales)
        raise ConfigError(
            f"lora must be that of lora.init_from={directory}, which has {stored}; got "
            f"{configured}. "
            f"{_suggest_settings(ranks, adapter)}"
        )
    return adapter.adapters


def _check_base_name(cfg: Config, directory: Path) -> None:
    name = read_adapter_config(directory).get("base_model_name_or_path")
    base = base_folder(cfg)
    if not isinstance(name, str) or not name:
        return
    if not any(_may_be_same(name, folder) for folder in (str(base), portable_base_name(base))):
        raise ConfigError(
            f"init.checkpoint must be the base of lora.init_from={directory}, which is {name}; got "
            f"{base}. Try --set init.checkpoint=DIRECTORY of that model; if this is that model, "
            "correct base_model_name_or_path in the adapter's adapter_config.json."
        )


def _may_be_same(name: str, folder: str) -> bool:
    """True if two paths may be one folder on two machines, by the ends of their names.

    A base that a run made is RUN/base, so `base` alone says nothing.
    """
    ends = [
        Path(path).parts[-2:] if Path(path).name == "base" else Path(path).parts[-1:]
        for path in (name, folder)
    ]
    return all(a == b for a, b in zip(*(reversed(end) for end in ends), strict=False))


def _describe(ranks: dict[str, int], scales: dict[str, float]) -> str:
    return ", ".join(f"{name} of rank {ranks[name]} and scale {scales[name]:g}" for name in ranks)


def _suggest_settings(ranks: dict[str, int], adapter: PeftAdapter) -> str:
    settings = [f"--set lora.targets={','.join(ranks)}", "--set lora.rank_stabilized=False"]
    for key, names in (("attention", ATTENTION), ("expert", EXPERTS)):
        pairs = {(ranks[name], adapter.scales[name]) for name in names if name in ranks}
        if len(pairs) > 1:
            return f"A run has one rank and one alpha for {', '.join(names)}."
        rank, scale = next(iter(pairs), (0, 1.0))
        settings.append(f"--set lora.{key}_rank={rank}")
        settings += [f"--set lora.{key}_alpha={scale * rank:g}"] if rank else []
    return f"Try {' '.join(settings)}."
