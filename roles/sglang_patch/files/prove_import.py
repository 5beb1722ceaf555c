# Copyright: the sglang-kit contributors
# SPDX-License-Identifier: Apache-2.0
"""Import a patched module: - FILE MODULE CLASS METHOD,METHOD.

Exit status: 0 if it was imported and the class has the methods; 1 if the file itself fails; 3 if this node
cannot import it for another reason (no torch, no GPU library). The last line of the output says which.
"""

import importlib
import importlib.util
import os
import sys
import tempfile
import traceback

path, module, class_name, methods = sys.argv[1:]

if importlib.util.find_spec("torch") is None:
    print("torch is not installed in this tree")
    sys.exit(3)

with tempfile.TemporaryDirectory() as home:
    # What the engine's libraries create at import must not land in a real home.
    os.environ["HOME"] = home
    try:
        cls = getattr(importlib.import_module(module), class_name)
    except BaseException as exc:
        traceback.print_exc()
        frames = traceback.extract_tb(exc.__traceback__)
        at_fault = isinstance(exc, SyntaxError) and exc.filename == path
        # An error inside what the file imports has its last frame elsewhere, and is none of ours.
        at_fault = at_fault or (frames[-1].filename == path and not isinstance(exc, ImportError))
        print(f"{type(exc).__name__}: {exc}")
        sys.exit(1 if at_fault else 3)
    missing = [name for name in methods.split(",") if not callable(getattr(cls, name, None))]
    print(
        f"{class_name} lacks {', '.join(missing)}" if missing else f"imported, {class_name} has the methods"
    )
    sys.exit(1 if missing else 0)
