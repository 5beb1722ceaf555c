"""Prove a patched kimi_k25.py without the kit's code: prove.py FILE SHA-256-AS-RELEASED."""

import ast
import hashlib
import pathlib
import sys
import typing

SIGNATURES = {
    "set_eagle3_layers_to_capture": "self, layer_ids: Optional[List[int]]=None",
    "get_embed_and_head": "self",
    "set_embed_and_head": "self, embed, head",
}
CALLS = {
    "set_eagle3_layers_to_capture": [((), (None,)), (([2, 30, 58],), ([2, 30, 58],))],
    "get_embed_and_head": [((), ())],
    "set_embed_and_head": [(("e", "h"), ("e", "h"))],
}

raw = pathlib.Path(sys.argv[1]).read_bytes()
tree = ast.parse(raw)
compile(raw, sys.argv[1], "exec")
cls = next(
    n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "KimiK25ForConditionalGeneration"
)
methods = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name in SIGNATURES]

# Exactly the three, with the signatures that the language model has.
assert {n.name: ast.unparse(n.args) for n in methods} == SIGNATURES
assert len(methods) == 3

# Everything else is as released: the bytes are the same without them, their marks and the empty line above.
lines = raw.splitlines(keepends=True)
for node in reversed(methods):
    del lines[node.lineno - 3 : node.end_lineno + 1]
assert hashlib.sha256(b"".join(lines)).hexdigest() == sys.argv[2]


# They do what they should.
class LanguageModel:
    def __getattr__(self, name):
        if name not in SIGNATURES:
            raise AttributeError(name)
        return lambda *args: (name, args)


space = {"List": typing.List, "Optional": typing.Optional}
exec(compile(ast.Module(body=methods, type_ignores=[]), "methods", "exec"), space)
for name, calls in CALLS.items():
    wrapper = type("Wrapper", (), {name: space[name]})()
    wrapper.language_model = LanguageModel()
    for given, passed in calls:
        assert getattr(wrapper, name)(*given) == (name, passed)
    wrapper.language_model = None
    try:
        getattr(wrapper, name)(*calls[0][0])
    except AttributeError as exc:
        assert str(exc) == f"language_model (NoneType) has no {name}"
    else:
        raise AssertionError(f"{name} does not guard against a missing language model")
print("proved")
