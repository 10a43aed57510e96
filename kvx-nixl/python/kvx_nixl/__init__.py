"""kvx inside NIXL: the backend KVX (libplugin_KVX.so) for vLLM as it is, and the program `kvx`. The calls of SGLang and Dynamo are
replayed by tests, neither was run.

`python -m kvx_nixl install` puts the backend into the NIXL of this environment; `check` runs it, `remove` takes it back."""

import os

#: The folder with the program `kvx` and libplugin_KVX.so.
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin")
#: The program.
KVX = os.path.join(FOLDER, "kvx")
