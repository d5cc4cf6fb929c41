"""Triton's interpreter without its repeated work.

A launch replaces the functions of ``triton.language`` by interpreted ones and restores them at its end. For every
device function that a kernel calls, the interpreter looks through the whole language again, though nothing is left to
replace: two fifths of its time. Kernels compute the same without.
"""

from typing import Any

from triton import language
from triton.runtime import interpreter

replaced: set[int] = set()  # names of modules, by identity, for which nothing is left to replace


def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What `InterpretedFunction.__call__` does, with one look at every module."""
    names = self.fn.__globals__
    if id(names) not in replaced:
        if any(value is language.core for value in names.values()):  # triton's own functions; this is never restored
            interpreter._patch_lang(self.fn)
        replaced.add(id(names))
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def speed_up() -> None:
    """Let device functions rely on what their launch has replaced."""
    interpreter.InterpretedFunction.__call__ = call_device_function
