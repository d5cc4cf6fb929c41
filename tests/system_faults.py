"""System calls that fail: a filter in the kernel answers them with an error, for the process that asks for it."""

import ctypes
import errno
import platform
import struct

CALLS = {
    "x86_64": {"fsync": 74, "fdatasync": 75, "pwrite64": 18, "write": 1},
    "aarch64": {"fsync": 82, "fdatasync": 83, "pwrite64": 68, "write": 64},
}
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF: take a word, jump where it is, answer


def fail_system_calls(*names: str, error: int = errno.EIO) -> None:
    """From now on these calls fail, in this process and for good: it has to be one of the test's own (Linux)."""
    numbers = [CALLS[platform.machine()][name] for name in names]
    rules = [(LOAD, 0, 0, 0)]
    for i, number in enumerate(numbers):
        rules.append((EQUAL, len(numbers) - i, 0, number))
    rules += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.addressof(program), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter")
