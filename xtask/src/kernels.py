"""Compiles a source by NVRTC or hipRTC, whose interfaces differ only in the prefix of their names.

python3 kernels.py LIBRARY PREFIX KIND SOURCE OUTPUT OPTION
writes the result that the library calls KIND (PTX or Code).
"""

import ctypes
import sys

library, prefix, kind, source, output, option = sys.argv[1:]
compiler = ctypes.CDLL(library)


def call(name, *arguments):
    """Calls a function and returns its result, 0 unless it failed."""
    return getattr(compiler, prefix + name)(*arguments)


def check(result, log=b""):
    if result != 0:
        describe = getattr(compiler, prefix + "GetErrorString")
        describe.restype = ctypes.c_char_p
        sys.exit(f"{prefix}: {describe(result).decode()}\n{log.rstrip(bytes(1)).decode(errors='replace')}")


def fetch(program, what):
    """Returns what the library calls `what` of a program."""
    size = ctypes.c_size_t()
    check(call(f"Get{what}Size", program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    check(call(f"Get{what}", program, text))
    return text.raw


with open(source, "rb") as file:
    text = file.read()
program = ctypes.c_void_p()
check(call("CreateProgram", ctypes.byref(program), text, b"kernels.cu", 0, None, None))
options = (ctypes.c_char_p * 1)(option.encode())
result = call("CompileProgram", program, 1, options)
check(result, fetch(program, "ProgramLog"))
with open(output, "wb") as file:
    file.write(fetch(program, kind))
