"""Pickled CIFAR-10 and ImageNet32 batches, read without running what a pickle may ask for.

A pickle is a program that calls functions. Here its instructions are read with `pickletools` and run on a stack of
plain values. A call is only recorded, never made, and NumPy arrays are recognised from the record. Nothing is imported,
and no more memory is allocated than for what the file really contains.

A small pickle may also describe an endless value. Tuples of the same tuple twice, sixty deep, have 2⁶⁰ elements for
code that walks, hashes, compares or prints them. So this is done to texts alone, and keys and names must be texts. The
number of instructions is bounded, and so are the bytes that they make from earlier ones.
"""

import pickletools
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

_ARRAY = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
_BUFFER = {"numpy.core.numeric _frombuffer", "numpy._core.numeric _frombuffer"}  # protocol 5
_ENCODE = "_codecs encode"
_LARGEST_NAME = 200
_MOST_INSTRUCTIONS = 2_000_000  # a batch has one or two for each label and file name


@dataclass
class _Call:
    """A call that the pickle asks for, and the state it would set on the result."""

    function: Any
    arguments: Any
    state: Any = field(default=None)


def read_batch(file: IO[bytes], size: int) -> dict[str, Any]:
    """Return the dictionary of a pickled batch. Its NumPy array `data` becomes (N, D) uint8, other objects stay inert.

    Args:
        file: the pickle.
        size: its number of bytes.

    Raises:
        ValueError: it is not such a dictionary, or does not end.
    """
    try:
        value = _Machine(file, size).play()
        if not isinstance(value, dict):
            raise ValueError(f"expected a dictionary, got {type(value).__name__}")
        found = {_text(key): item for key, item in value.items()}
        return found | ({"data": _array(found["data"])} if isinstance(found.get("data"), _Call) else {})
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise ValueError(f"not a pickled batch: {error}") from error


class _Sized:
    """A file that reads no more than it has, whatever length a pickle claims."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size = file, size

    def read(self, count: int) -> bytes:
        if count > self.size:
            raise ValueError(f"it claims {count:,} bytes where {self.size:,} are")
        return self.file.read(count)

    def readline(self) -> bytes:
        return self.file.readline(self.size)


class _Machine:
    """An interpreter of a pickle's instructions. Each costs the same, however much the stack and the memo hold."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file = _Sized(file, size)
        self.left = size  # bytes that may still be made from those read
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under the marks
        self.memo: dict[int, Any] = {}

    def play(self) -> Any:
        """Return the value that the pickle builds, with calls left as `_Call`."""
        instructions: Any = pickletools.genops(self.file)  # type: ignore[arg-type]
        for number, (opcode, argument, _) in enumerate(instructions):
            if number == _MOST_INSTRUCTIONS:
                raise ValueError(f"it has more than {_MOST_INSTRUCTIONS:,} instructions")
            if opcode.name == "STOP":
                return self.stack.pop()
            self._do(opcode.name, argument)
        raise ValueError("it ends before its last instruction")

    def _do(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in ("PROTO", "FRAME"):
            return
        if name == "MARK":
            self.below.append(stack)
            self.stack = []
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
            stack.append({"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_TUPLE": ()}[name])
        elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in ("TUPLE", "LIST"):
            items = self._since_mark()
            self.stack.append(tuple(items) if name == "TUPLE" else items)
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            if len(stack) < count:
                raise IndexError("the stack is empty")
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("DICT", "SETITEMS", "SETITEM"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else self._since_mark()
            if name == "DICT":
                self.stack.append({})
            pairs = zip(items[::2], items[1::2], strict=True)
            self.stack[-1].update({_key(key): value for key, value in pairs})
        elif name in ("APPENDS", "APPEND"):
            items = [stack.pop()] if name == "APPEND" else self._since_mark()
            self.stack[-1].extend(items)
        elif name == "GLOBAL":
            stack.append(_Call(argument, None))
        elif name == "STACK_GLOBAL":
            attribute, module = _name(stack.pop()), _name(stack.pop())
            stack.append(_Call(f"{module} {attribute}", None))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop().function
            stack.append(self._encoded(arguments) if function == _ENCODE else _Call(function, arguments))
        elif name == "BUILD":
            state, call = stack.pop(), stack[-1]
            if not isinstance(call, _Call):
                raise TypeError("only what was called has a state")
            call.state = state
        elif isinstance(argument, str | bytes | bytearray | int | float):
            stack.append(argument)
        else:
            raise ValueError(f"instruction {name} has no place in a batch")

    def _since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def _encoded(self, arguments: Any) -> bytes:
        """Return bytes that Python 3 wrote in protocol 2 as a call."""
        text = arguments[0]
        if not isinstance(text, str):
            raise TypeError("it encodes what is no text")
        self.left -= len(text)
        if self.left < 0:
            raise ValueError("it makes more bytes than it has")
        return text.encode("latin-1")


def _key(value: Any) -> str | bytes:
    if not isinstance(value, str | bytes):
        raise TypeError(f"a key is {type(value).__name__}, expected a text")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LARGEST_NAME:
        raise TypeError("a name of what it calls is none")
    return value


def _array(call: _Call) -> Any:
    """Return the array that a call would have made, if it is one of bytes in rows; else the inert call."""
    if call.function in _ARRAY and isinstance(call.state, tuple) and len(call.state) == 5:
        _, shape, dtype, fortran, content = call.state
    elif call.function in _BUFFER and isinstance(call.arguments, tuple) and len(call.arguments) == 4:
        content, dtype, shape, order = call.arguments
        fortran = isinstance(order, str) and order == "F"
    else:
        return call
    content = content.encode("latin-1") if isinstance(content, str) else content
    kind = _text(dtype.arguments[0])[:20]
    plain = isinstance(shape, tuple) and all(isinstance(size, int) and 0 <= size < 1 << 62 for size in shape)
    if kind != "u1" or not isinstance(content, bytes | bytearray) or not plain or len(shape) != 2:
        raise ValueError(
            f"expected an array (N, D) of uint8, got {kind!r} in {len(shape) if plain else 'no'} dimensions"
        )
    if shape[0] * shape[1] != len(content):
        raise ValueError(f"an array of shape {shape} with {len(content):,} bytes")
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran is True else "C")


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else _key(value)  # type: ignore[return-value]
