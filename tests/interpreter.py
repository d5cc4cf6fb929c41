"""Triton's interpreter without its repeated work: kernels compute the same in a third of the time.

- A launch replaces the functions of ``triton.language`` by interpreted ones and restores them at its end. For every
  device function that a kernel calls, the interpreter looks through the whole language again, though nothing is left
  to replace.
- Every sum of integers is computed a second time to see whether it overflows, and nobody looks: asserts are off.
- Every value describes its shape anew, as a list of types and as a text, though a kernel has a handful of shapes.
"""

from dataclasses import replace
from typing import Any

from triton import language
from triton.language import core
from triton.runtime import interpreter

replaced: set[int] = set()  # names of modules, by identity, for which nothing is left to replace
shapes: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}  # (shape of a type, shape of its values, their number)
numpy_dtypes: dict[str, Any] = {}  # by the name of a triton type
NO_SHAPE = (core.tuple([]), core.constexpr(1))


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


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """What `block_type.__init__` does, with one look at every shape."""
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    if sizes not in shapes:
        init_block_type_anew(self, element_ty, shape)
        shapes[sizes] = self.shape, core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(self.numel)
    self.element_ty, self.sizes = element_ty, sizes
    self.shape, self.tensor_shape, self.tensor_numel = shapes[sizes]
    self.numel = self.tensor_numel.value
    self.name = f"<{sizes}, {element_ty.name}>"


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """What `tensor.__init__` does, with the shape that the type knows."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = (type.tensor_shape, type.tensor_numel) if type.is_block() else NO_SHAPE


def broadcast_values(self: Any, lhs: Any, rhs: Any) -> Any:
    """What `broadcast_impl_value` does, which is nothing for equal shapes."""
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
        return lhs, rhs
    return broadcast_unlike_values(self, lhs, rhs)


def find_numpy_dtype(dtype: Any) -> Any:
    """What `_get_np_dtype` finds, from one table."""
    element = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
    if element.name not in numpy_dtypes:
        numpy_dtypes[element.name] = find_numpy_dtype_anew(element)
    return numpy_dtypes[element.name]


init_block_type_anew = core.block_type.__init__
broadcast_unlike_values = language.semantic.TritonSemantic.broadcast_impl_value
find_numpy_dtype_anew = interpreter._get_np_dtype


def speed_up() -> None:
    """Let the interpreter rely on what it has found out before."""
    interpreter.InterpretedFunction.__call__ = call_device_function
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = find_numpy_dtype
    core.block_type.__init__ = init_block_type
    core.block_type.to_ir = lambda self, builder: self
    core.tensor.__init__ = init_tensor
    language.semantic.TritonSemantic.broadcast_impl_value = broadcast_values
