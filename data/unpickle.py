"""Pickled CIFAR-10 and ImageNet32 batches, read without running what a pickle may ask for.

A pickle is a program that calls functions. Here its instructions are read with `pickletools` and played on a stack of plain
values; a call is only written down, never made, and NumPy arrays are recognised by what was written down. Nothing is
imported, and nothing is allocated but what the file really contains.
"""

import pickletools
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

_ARRAY = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
_BUFFER = {"numpy.core.numeric _frombuffer", "numpy._core.numeric _frombuffer"}  # protocol 5
_ENCODE = "_codecs encode"
_MARK = object()


@dataclass
class _Call:
    """A call that the pickle asks for, and the state it would set on the result."""

    function: Any
    arguments: Any
    state: Any = field(default=None)


def read_batch(file: IO[bytes], size: int) -> dict[str, Any]:
    """The dictionary of a pickled batch; NumPy arrays of bytes become arrays (N, D) uint8, other objects stay inert.

    Args:
        file: the pickle.
        size: its number of bytes.

    Raises:
        ValueError: it is not such a dictionary, or does not end.
    """
    try:
        value = _play(_Sized(file, size))
        if not isinstance(value, dict):
            raise ValueError(f"expected a dictionary, got {type(value).__name__}")
        return {_text(key): _array(item) if isinstance(item, _Call) else item for key, item in value.items()}
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a pickled batch: {error}") from error


class _Sized:
    """A file that reads no more than there is, whatever length a pickle claims."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size = file, size

    def read(self, count: int) -> bytes:
        if count > self.size:
            raise ValueError(f"it claims {count:,} bytes where {self.size:,} are")
        return self.file.read(count)

    def readline(self) -> bytes:
        return self.file.readline(self.size)


def _play(file: _Sized) -> Any:
    """What the pickle builds, with calls left as `_Call`."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        at = len(stack) - 1 - stack[::-1].index(_MARK)
        items = stack[at + 1 :]
        del stack[at:]
        return items

    instructions: Any = pickletools.genops(file)  # type: ignore[arg-type]
    for opcode, argument, _ in instructions:
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return stack.pop()
        if name == "MARK":
            stack.append(_MARK)
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
            stack.append({"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_TUPLE": ()}[name])
        elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("TUPLE", "LIST"):
            stack.append({"TUPLE": tuple, "LIST": list}[name](since_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("DICT", "SETITEMS", "SETITEM"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else since_mark()
            if name == "DICT":
                stack.append({})
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPENDS", "APPEND"):
            items = [stack.pop()] if name == "APPEND" else since_mark()
            stack[-1].extend(items)
        elif name == "GLOBAL":
            stack.append(_Call(argument, None))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_Call(f"{module} {attribute}", None))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop().function
            encoded = function == _ENCODE and isinstance(arguments[0], str)  # how protocol 2 writes bytes from Python 3
            stack.append(arguments[0].encode("latin-1") if encoded else _Call(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif argument is not None:  # numbers and strings
            stack.append(argument)
        else:
            raise ValueError(f"instruction {name} has no place in a batch")
    raise ValueError("it ends before its last instruction")


def _array(call: _Call) -> Any:
    """The array that a call would have made, if it would have made one of bytes in rows; else the inert call."""
    if call.function in _ARRAY and isinstance(call.state, tuple) and len(call.state) == 5:
        _, shape, dtype, fortran, content = call.state
    elif call.function in _BUFFER and isinstance(call.arguments, tuple) and len(call.arguments) == 4:
        content, dtype, shape, order = call.arguments
        fortran, content = order == "F", bytes(content)
    else:
        return call
    content = content.encode("latin-1") if isinstance(content, str) else content
    if _text(dtype.arguments[0]) != "u1" or not isinstance(content, bytes) or len(shape) != 2:
        raise ValueError(f"expected an array (N, D) of uint8, got {_text(dtype.arguments[0])} {shape}")
    if shape[0] * shape[1] != len(content):
        raise ValueError(f"an array of shape {shape} with {len(content):,} bytes")
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
