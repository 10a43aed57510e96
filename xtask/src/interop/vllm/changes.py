"""Lists what a version of vLLM changed in the parts that kvx follows.

`changes.py WORK OLD NEW`: WORK contains vLLM's environment, as set_up.py makes it, and OLD and NEW are
versions or folders with vLLM's sources. Compares definitions, not text: comments and docstrings do not
count. Prints one line per changed definition, and a summary that says what to look at in kvx."""

import ast
import glob
import os
import re
import subprocess
import sys
import tempfile

CONNECTOR = "vllm/distributed/kv_transfer/kv_connector"
# The files that kvx follows, a name that a definition must contain if not all are followed, and the
# part of kvx that depends on them.
PARTS = {
    "the connector's base class": (
        [f"{CONNECTOR}/base.py", f"{CONNECTOR}/factory.py", f"{CONNECTOR}/utils.py", f"{CONNECTOR}/v1/base.py",
         f"{CONNECTOR}/v1/metrics.py", "vllm/config/kv_transfer.py"],
        None, "kvx-python/python/kvx/vllm.py"),
    "the calls of the base class": (
        ["vllm/v1/core/sched/scheduler.py", "vllm/v1/core/sched/output.py", "vllm/v1/outputs.py", "vllm/v1/engine/core.py",
         "vllm/v1/worker/kv_connector_model_runner_mixin.py", "vllm/v1/worker/gpu/kv_connector.py", "vllm/v1/worker/gpu_worker.py"],
        "kv_connector|self\\.connector|kv_transfer", "kvx-python/python/kvx/vllm.py"),
    "the KV cache's groups and layouts": (
        ["vllm/v1/kv_cache_interface.py", "vllm/v1/attention/backends/cpu_attn.py"],
        "transfer|layout|sliding_window", "kvx-python/python/kvx/vllm.py, kvx-vllm/src/mapping"),
    "NixlConnector": (
        [f"{CONNECTOR}/v1/nixl/*.py", "vllm/distributed/nixl_utils.py"],
        None, "kvx-vllm/src/wire, kvx-vllm/src/engine, kvx-python/src/stats.rs"),
    "MooncakeConnector": ([f"{CONNECTOR}/v1/mooncake/mooncake_*.py"], None, "kvx-vllm/src/wire/mooncake"),
    "KV events": (["vllm/distributed/kv_events.py"], None, "what reads or publishes KV events"),
    "the OpenAI protocol": (
        ["vllm/entrypoints/**/*.py"], "kv_transfer_params|kv_cache_report", "kvx-proxy, kvx-cli's serve"),
}
# Names on the wire: keys of parameters, metrics.
WIRE = re.compile(r"^((do_)?remote_\w+|transfer_id|tp_size|kv_transfer_params|vllm:\w+)$")


def definitions(path):
    """Returns the definitions of a module: name, and its signature and meaning as text."""
    with open(path) as file:
        tree = ast.parse(file.read())
    found = {}

    def plain(node):
        """Returns the source of a node without docstrings."""
        for inner in ast.walk(node):
            body = getattr(inner, "body", None)
            if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(getattr(body[0], "value", None), ast.Constant):
                inner.body = body[1:] or [ast.Pass()]
        return ast.unparse(node)

    def add(name, signature, meaning):
        """Adds a definition. A name may have several, for example one in each branch of an `if`."""
        before = found.get(name)
        found[name] = (f"{before[0]} / {signature}", f"{before[1]}\n{meaning}") if before else (signature, meaning)

    def visit(nodes, prefix):
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
                add(f"{prefix}{node.name}", f"({ast.unparse(node.args)}){result}", plain(node))
            elif isinstance(node, ast.ClassDef):
                decorators = "\n".join(f"@{ast.unparse(each)}" for each in node.decorator_list)
                add(f"{prefix}{node.name}", ", ".join(map(ast.unparse, node.bases + node.keywords)), decorators)
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    add(prefix + ast.unparse(target), ast.unparse(node), ast.unparse(node))
            elif isinstance(node, (ast.If, ast.Try)):
                visit(node.body, prefix)
                for handler in getattr(node, "handlers", []):
                    visit(handler.body, prefix)
                visit(node.orelse, prefix)
                visit(getattr(node, "finalbody", []), prefix)

    visit(tree.body, "")
    return found


def wire_names(path):
    """Returns the strings of a module that peers or users see."""
    with open(path) as file:
        tree = ast.parse(file.read())
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str) and WIRE.match(node.value)}


def compare(old, new, patterns, word):
    """Yields lines about the changed definitions of the files that the patterns name."""
    paths = {os.path.relpath(path, root) for root in (old, new) for pattern in patterns
             for path in glob.glob(os.path.join(root, pattern), recursive=True)}
    for path in sorted(paths):
        here = [os.path.join(root, path) for root in (old, new)]
        before, after = (definitions(each) if os.path.exists(each) else {} for each in here)
        names = [wire_names(each) if os.path.exists(each) else set() for each in here]
        lines = []
        for name in sorted(before.keys() | after.keys()):
            was, is_now = before.get(name), after.get(name)
            texts = [f"{name} {each[1]}" for each in (was, is_now) if each]
            if was == is_now or word and not any(re.search(word, text) for text in texts):
                continue
            if was is None:
                lines.append(f"+ {name}{shown(is_now[0])}")
            elif is_now is None:
                lines.append(f"- {name}{shown(was[0])}")
            elif was[0] != is_now[0]:
                lines.append(f"! {name}: {was[0]} became {is_now[0]}")
            else:
                lines.append(f"~ {name}")
        lines += [f"+ on the wire: {name}" for name in sorted(names[1] - names[0])]
        lines += [f"- on the wire: {name}" for name in sorted(names[0] - names[1])]
        if lines:
            yield path
            yield from (f"    {line}"[:160] for line in lines)


def shown(signature):
    return signature if signature.startswith("(") else f": {signature}"


def unpacked(work, version, scratch):
    """Returns the folder with the sources of a version."""
    if os.path.isdir(version):
        return version
    from versions import sources

    folder = os.path.join(scratch, version)
    os.makedirs(folder)
    subprocess.run(["tar", "xzf", sources(work, version), "-C", folder, "--strip-components=1", "--wildcards", f"vllm-{version}/vllm/*.py"],
                   check=True)
    return folder


def main():
    work, *versions = sys.argv[1:4]
    with tempfile.TemporaryDirectory() as scratch:
        old, new = (unpacked(work, version, scratch) for version in versions)
        summary = []
        for part, (patterns, word, ours) in PARTS.items():
            lines = list(compare(old, new, patterns, word))
            print(f"\n== {part}\n" + ("\n".join(lines) or "unchanged"))
            kinds = [sum(line.startswith(f"    {kind} ") for line in lines) for kind in "+-!~"]
            if lines:
                summary.append(f"{part}: {kinds[0]} new, {kinds[1]} gone, {kinds[2]} with other signatures, {kinds[3]} changed inside: "
                               f"look at {ours}")
        print("\n== summary\n" + ("\n".join(summary) or "unchanged"))


if __name__ == "__main__":
    main()
