"""The plugin manager of one run: registers what the config names, isolates plugin code, and times it."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pluggy

from jackfield import results
from jackfield.errors import JackfieldError, PluginError, nearest, told
from jackfield.hookspecs import Hooks


class PluginManager(pluggy.PluginManager):
    """One for each run; there is no module-level state. An exception inside a hook names the plugin and the hook."""

    def __init__(self) -> None:
        super().__init__("jackfield")
        self.add_hookspecs(Hooks)
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        """Wall seconds spent by (plugin, hook); a wrapper's time includes what it wraps."""
        self._passed: Any = None
        """The result checked last: a wrapper that hands it on as it is costs no second check."""

    def register(self, plugin: Any, name: str | None = None) -> str | None:
        """Register and check; raises PluginError for a wrong hook signature or a name registered twice."""
        name = name or type(plugin).__name__
        try:
            super().register(plugin, name)
        except ValueError as error:
            raise PluginError(f"plugin {name!r} is registered already: name it once, or give one of the two another label") from error
        except pluggy.PluginValidationError as error:
            raise PluginError(f"plugin {name!r}: {' '.join(str(error).split())}; see docs/hooks for the signature") from error
        for caller in [c for c in self.get_hookcallers(plugin) or () if c.has_spec()]:
            for impl in caller.get_hookimpls():
                if impl.plugin is plugin:
                    impl.function = self._isolated(impl.function, name, caller.name, impl.wrapper)  # type: ignore[misc]
        return name

    def check(self) -> None:
        """Raise PluginError for an implementation of a hook that does not exist."""
        self.hook.add_hookspecs(manager=self)
        for plugin in self.get_plugins():
            for caller in self.get_hookcallers(plugin) or ():
                if not caller.has_spec() and not all(i.optionalhook for i in caller.get_hookimpls()):
                    hint = nearest(caller.name, [n for n in vars(Hooks) if not n.startswith("_")], "see docs/hooks for the hooks there are")
                    raise PluginError(f"plugin {self.get_name(plugin)!r} implements an unknown hook {caller.name!r}; {hint}")

    @contextlib.contextmanager
    def guard(self, plugin: str, hook: str) -> Iterator[None]:
        """Around a plugin's code: time it, and raise PluginError for whatever it raises."""
        start = time.perf_counter()
        try:
            yield
        except JackfieldError:
            raise
        except Exception as error:
            raise PluginError(f"plugin {plugin!r} raised in hook {hook!r}: {told(error)}") from error
        finally:
            self.seconds[plugin, hook] += time.perf_counter() - start

    def _isolated(self, function: Callable[..., Any], plugin: str, hook: str, wrapper: bool) -> Callable[..., Any]:
        """The one place where plugin code is isolated: its exception becomes a PluginError that says whose it is."""

        def call(*args: Any) -> Any:
            with self.guard(plugin, hook):
                self._passed = results.checked(plugin, hook, function(*args), args)
                return self._passed

        def call_wrapper(*args: Any) -> Generator[Any, Any, Any]:
            with self.guard(plugin, hook):
                found = yield from function(*args)
                if found is not self._passed:
                    self._passed = results.checked(plugin, hook, found, args, wrapper=True)
                return found

        return call_wrapper if wrapper else call
