"""mkdocs hooks: pages that are generated from the code, so that they cannot go stale, and the navigation."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from jackfield import registry
from jackfield.config import RunConfig
from jackfield.hookspecs import Hooks
from jackfield.registry import KINDS
from jackfield.results import WANTED
from jackfield_commands.schema import schema

DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS / "tools"))

ARGUMENTS = {
    "run": "`jackfield.run.Run`: config, step, seed, `run.policy`, `run.reference`, `run.critic`; hooks may add to `run.metrics`",
    "prompts": "list of `jackfield.batch.Prompt`: an id that is unique in the run, and the dataset's row",
    "batch": "`jackfield.Batch`, B samples of at most T tokens; never changed in place: `batch.replace(...)`",
    "metrics": "dict of floats, to read or to add to",
    "report": "`jackfield.shard.SyncReport`: seconds by phase, bytes shared, copied and sent",
    "folder": "`pathlib.Path` of a folder that exists",
    "error": "the exception that ends the run",
    "manager": "`jackfield.manager.PluginManager` of the run",
}
EXAMPLES = {
    "score": "return {'brief': (batch.response_lengths < 32).float()}",
    "filter": "return batch.rewards > 0",
    "step_end": "metrics['mine/seconds'] = time.perf_counter() - self.start",
    "checkpoint_save": "(folder / 'mine.json').write_text(json.dumps(self.state))",
    "checkpoint_load": "self.state = json.loads((folder / 'mine.json').read_text())",
    "evaluate": "return {'length': 12.0}",
    "configure": "if run.config.batch.group_size < 4:\n            raise ConfigError('mine needs groups of four')",
    "add_hookspecs": "manager.add_hookspecs(MyHooks)",
}


def hook_names() -> list[str]:
    """All hooks, in the order of the specification."""
    return [name for name in vars(Hooks) if not name.startswith("_")]


def signature(name: str) -> str:
    """As a plugin writes it, less `self`."""
    return f"{name}({', '.join(list(inspect.signature(getattr(Hooks, name)).parameters)[1:])})"


def hook_page(name: str) -> str:
    """A hook's page: signature, meaning, arguments, result, where it runs, example."""
    spec = getattr(Hooks, name)
    first = spec.jackfield_spec["firstresult"]
    arguments = list(inspect.signature(spec).parameters)[1:]
    result = (
        "One result: plugins are asked in turn, and the first answer that is not None is taken."
        if first
        else "All results: every plugin is called; answers of None are left out."
    )
    if name in WANTED:
        result += f" Anything but a {WANTED[name].__name__}, or a tensor of another shape, is an error that names the plugin."
    body = EXAMPLES.get(name, "..." if name not in ("rollout", "advantage", "update") else "return None  # let another plugin answer")
    lines = [f"# {name}", "", "```python", f"def {signature(name)}", "```", "", inspect.getdoc(spec) or "", ""]
    lines += ["| argument | meaning |", "|---|---|", *(f"| `{a}` | {ARGUMENTS[a]} |" for a in arguments), ""]
    lines += [f"**Result.** {result}", ""]
    lines += ["**Where.** On the controller, in one process, with whole batches; never on workers, never per token or micro-batch.", ""]
    lines += [
        "**Implement it**",
        "",
        "```python",
        "from jackfield import Component, hookimpl",
        "",
        "class Mine(Component):",
        "    @hookimpl",
    ]
    lines += [f"    def {name}(self, {', '.join(arguments)}):", f"        {body}", "```", ""]
    if first or name in ("score", "filter"):
        lines += ["**Wrap it**", "", "```python", "    @hookimpl(wrapper=True)", f"    def {name}(self, {', '.join(arguments)}):"]
        given = "the other plugins run here" + ("" if first else "; the list of their results")
        lines += [f"        result = yield  # {given}", "        return result", "```", ""]
    return "\n".join(lines)


def hooks_index() -> str:
    """The list of hooks."""
    head = "# Hooks\n\nIn the order of the specification; `tests/core/test_hook_order.py` pins the order in which a run calls them.\n\n"
    rows = [
        f"| [`{signature(n)}`]({n}.md) | {(inspect.getdoc(getattr(Hooks, n)) or '').split('. ')[0].splitlines()[0]} |" for n in hook_names()
    ]
    return (
        head
        + "| hook | |\n|---|---|\n"
        + "\n".join(rows)
        + "\n\nA plugin may leave out arguments that it does not need, and give none a default.\n"
    )


def config_page() -> str:
    """Every field of a run's config, from the schema."""
    from jackfield_commands.describe import fields

    rows = [
        f"| `{f.path}` | {f.type} | {f'`{f.default}`' if f.default else ''} | {f.doc} |".replace(" | null", " or null")
        for f in fields(RunConfig)
    ]
    head = "# Configuration\n\nOne YAML file; `a.b=c` on the command line overrides a field. A chosen plugin is a name, or\n"
    head += "`{name: ..., option: value}`; its own options are shown by `jackfield plugins show NAME`. Editors complete configs by the\n"
    head += "[JSON schema](config.schema.json): `jackfield config --schema > config.schema.json`, and in the config's first line\n"
    head += "`# yaml-language-server: $schema=config.schema.json`. `jackfield config CONFIG --schema` adds its plugins' settings.\n\n"
    return head + "| field | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def component_page(kind: str) -> str:
    """A kind's page: its methods from the base class, and what is installed."""
    from jackfield import components

    bases = {c.kind: c for c in vars(components).values() if inspect.isclass(c) and getattr(c, "kind", None)}
    if kind == "algorithm":
        from jackfield import Algorithm

        bases[kind] = Algorithm
    lines = [f"# {kind}", ""]
    base = bases.get(kind)
    if base is not None:
        lines += [
            inspect.getdoc(base) or "",
            "",
            f"Derive from `jackfield.{base.__name__}`. [Types](types.md) has the fields of what its methods take and return.",
            "",
        ]
        members = [(n, m) for n, m in vars(base).items() if not n.startswith("_") or n in ("__len__", "__getitem__")]
        methods = [(n, m) for n, m in members if inspect.isfunction(m) or isinstance(m, property)]
        lines += ["| method | required | |", "|---|---|---|"] if methods else []
        for name, member in methods:
            function = member.fget if isinstance(member, property) else member
            required = "yes" if getattr(function, "__isabstractmethod__", False) else ""
            words = list(inspect.signature(function).parameters)[1:]
            shown = name if isinstance(member, property) else f"{name}({', '.join(words)})"
            doc = (inspect.getdoc(function) or "").replace("\n", " ").replace("|", r"\|")
            lines.append(f"| `{shown}` | {required} | {doc} |")
    elif kind == "hooks":
        lines += [
            "Any class with `@hookimpl` methods ([the hooks](../hooks/index.md)); derive from `jackfield.Component` for typed settings.",
            "",
        ]
    else:
        lines += ["A click command; `jackfield NAME` imports it when it is invoked.", ""]
    lines += [
        "",
        f"Entry-point group: `jackfield.{kind}`. Start one with `jackfield new {kind} NAME`.",
        "",
        "Installed with jackfield:",
        "",
    ]
    lines += [f"- `{e.name}` ({e.target})" for e in registry.entries(kind) if e.distribution == "jackfield"] or ["- none"]
    return "\n".join(lines) + "\n"


def components_index() -> str:
    """The list of kinds."""
    kinds = "\n".join(f"- [{kind}]({kind}.md)" for kind in KINDS)
    return f"# Kinds of plugin\n\n{kinds}\n\nWhat their methods take and return: [types](types.md).\n"


TYPES = {
    "jackfield.batch": ("Batch", "Prompt", "Trajectory"),
    "jackfield.components": ("Request", "Sample", "OutputRequest", "Outputs", "LossSums", "Position", "WorkerContext"),
    "jackfield.algorithm": ("Needs", "LossOutput"),
    "jackfield.shard": ("Shard", "SyncReport"),
}
"""What the methods of components take and return, beside plain types."""


def types_page() -> str:
    """The fields of each type, with what their docstrings say."""
    parts = ["# Types", "", "What the methods of plugins take and return. B samples, T tokens; b and T of a micro-batch.", ""]
    for module, names in TYPES.items():
        tree = ast.parse(inspect.getsource(importlib.import_module(module)))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for name in names:
            parts += [
                f"## {name}",
                "",
                f"`{module}.{name}`. {ast.get_docstring(classes[name]) or ''}",
                "",
                "| field | type | |",
                "|---|---|---|",
            ]
            body = classes[name].body
            for node, after in zip(body, [*body[1:], None], strict=True):
                if isinstance(node, ast.AnnAssign):
                    said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    doc = " ".join(after.value.value.split()) if said else ""
                    default = (
                        f", default {ast.unparse(node.value)}" if node.value is not None and "field(" not in ast.unparse(node.value) else ""
                    )
                    parts.append(
                        f"| `{ast.unparse(node.target)}` | `{ast.unparse(node.annotation)}`{default} | {doc} |".replace(
                            " | None`", " or None`"
                        )
                    )
            parts.append("")
    return "\n".join(parts)


def generated() -> dict[str, str]:
    """Every generated page by its path within docs/."""
    pages = {f"hooks/{name}.md": hook_page(name) for name in hook_names()}
    pages |= {f"components/{kind}.md": component_page(kind) for kind in KINDS}
    pages |= {"hooks/index.md": hooks_index(), "components/index.md": components_index(), "components/types.md": types_page()}
    pages["config.md"] = config_page()
    pages["config.schema.json"] = json.dumps(schema(), indent=1)
    readme = (DOCS.parent / "README.md").read_text()
    pages["index.md"] = (
        readme.replace("](docs/", "](").replace("](CONTRIBUTING.md)", "](contributing.md)").replace("](CHANGELOG.md)", "](changelog.md)")
    )
    pages["index.md"] = pages["index.md"].replace("[`core/jackfield/runner.py`](core/jackfield/runner.py)", "`core/jackfield/runner.py`")
    pages["contributing.md"] = (DOCS.parent / "CONTRIBUTING.md").read_text().replace("](docs/", "](")
    pages["changelog.md"] = (DOCS.parent / "CHANGELOG.md").read_text()
    return pages


def on_config(config: Any) -> Any:
    """Navigation: guides first, then one section a folder."""
    own = sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md") if "tools" not in p.parts)
    pages = sorted({*own, *(n for n in generated() if n.endswith(".md"))} - {"index.md"})
    guides = ["tutorial.md", "architecture.md", "laws.md", "testing.md", "errors.md"]
    first = [g for g in guides if g in pages]
    folders = sorted({p.split("/")[0] for p in pages if "/" in p})
    sections: list[Any] = [{f.capitalize(): [p for p in pages if p.startswith(f"{f}/")]} for f in folders]
    for section in sections:
        for items in section.values():
            items.sort(key=lambda p: (not p.endswith("/index.md"), p))
    last = [p for p in pages if "/" not in p and p not in first]
    config.nav = ["index.md", *first, *last, *sections]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    return files
