"""kvx inside NIXL: the backend KVX (libplugin_KVX.so) for an unmodified vLLM, and the program `kvx`. Tests replay the calls of
SGLang and Dynamo; neither was run.

`python -m kvx_nixl install` puts the backend into the NIXL of this environment; `check` runs it, `remove` removes it."""

import os

#: The folder with the program `kvx` and libplugin_KVX.so.
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin")
#: The program `kvx`.
KVX = os.path.join(FOLDER, "kvx")
