"""The JSON schema of a config file, as it is written: short forms, and plugins' own settings beside their name."""

from __future__ import annotations

from typing import Any

from jackfield import registry
from jackfield.config import ComponentSpec, RunConfig

KINDS = {"algorithm": "algorithm", "dataset": "dataset", "rollout": "rollout", "engine": "engine", "launcher": "launcher"}
KINDS |= {"transport": "transport", "rewards": "reward", "trackers": "tracker", "hooks": "hooks", "backend": "backend"}
"""The kind of plugin that a field chooses."""


def schema(config: RunConfig | None = None) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a config file; nothing is imported. With a config also the settings of the plugins that it names.

    Raises PluginError where one of those cannot be imported.
    """
    made = RunConfig.model_json_schema()
    specs = {name: made["$defs"].pop(name) for name in ("ComponentSpec", "PlacedSpec", "RewardSpec") if name in made["$defs"]}
    for spec in specs.values():
        del spec["properties"]["options"]
        spec["additionalProperties"] = True
    named = _named(config) if config else {}
    for model in (made, made["$defs"]["RoleConfig"]):
        for name, field in model["properties"].items():
            if name in KINDS:
                _choose(field, name, specs, named.get(name, []), made["$defs"])
    role = made["$defs"]["RoleConfig"]["properties"]["model"]
    role["anyOf"].insert(0, {"type": "string"})
    return made


def _choose(field: dict[str, Any], name: str, specs: dict[str, Any], named: list[ComponentSpec], defs: dict[str, Any]) -> None:
    """Replace a field's reference to a specification by every way of writing a choice."""
    target = field.get("items", field)
    (spec,) = (s for s in specs if f"#/$defs/{s}'" in str(target))
    target.pop("$ref", None)
    whole = specs[spec]
    own = [_with_settings(KINDS[name], plugin.name, whole, defs) for plugin in named]
    others = {**whole, "properties": {**whole["properties"], "name": {"type": "string", "not": {"enum": [p.name for p in named]}}}}
    target["anyOf"] = [{"enum": sorted({e.name for e in registry.entries(KINDS[name])})}, {"type": "string"}, *own, others]
    if "anyOf" in target and isinstance(field.get("default"), dict):
        field["default"] = field["default"]["name"]
    elif isinstance(field.get("default"), list):
        field["default"] = [each["name"] for each in field["default"]]
    elif name == "backend":
        target["anyOf"].append({"type": "null"})


def _with_settings(kind: str, plugin: str, spec: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """A choice of one plugin, its settings beside its name; their own definitions go to the others."""
    config = getattr(registry.load(kind, plugin), "Config", None)
    prefix = f"{kind}-{plugin}-".replace("/", "-")
    own = config.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}") if hasattr(config, "model_json_schema") else {}
    defs |= {f"{prefix}{name}": value for name, value in own.pop("$defs", {}).items()}
    properties = {**spec["properties"], **own.get("properties", {}), "name": {"const": plugin}}
    required = ["name", *own.get("required", [])]
    return {**spec, "title": plugin, "properties": properties, "required": required, "additionalProperties": False}


def _named(config: RunConfig) -> dict[str, list[ComponentSpec]]:
    found = {name: getattr(config, name) for name in KINDS if hasattr(config, name)}
    found["backend"] = [role.backend for role in (config.policy, config.reference, config.critic) if role.backend]
    chosen = {name: value if isinstance(value, list) else [value] for name, value in found.items()}
    return {name: list({spec.name: spec for spec in specs}.values()) for name, specs in chosen.items()}
