#!/usr/bin/env python3
"""Checks the #include lines of product code against who may use whom, and reports each forbidden one.

usage: layering_test.py [ROOT]        exit 1 when an include is forbidden, or when nothing was found to check
       layering_test.py --self-test   checks the checker: made-up trees that must pass or fail
"""
import pathlib, re, sys, tempfile

# A file of the folder on the left may include files of the folders (or the one file) on the right, and of its own folder. The
# longest matching folder counts: runtime/core/ is a layer of its own, below all others.
ALLOWED = {
    "runtime/core": [],
    "parallel": ["runtime/core"],
    "cache": ["runtime/core"],
    "attention": ["runtime/core", "cache/kv_view.h"],
    "model": ["runtime/core", "attention", "cache", "parallel"],
    "runtime": ["runtime/core", "model", "cache", "parallel"],
    "launch": ["runtime/core", "runtime", "model", "attention", "cache", "parallel"],
}
# Headers of libraries that one place wraps.
CONFINED = {
    "mpi.h": ["parallel", "launch/version_command.cc"],
    "spdlog/": ["runtime/core"],
    "gtest/": [],
}
SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.M)


def inside(path, place):
    return path == place or path.startswith(place + "/")


def layer_of(path):
    return max((folder for folder in ALLOWED if inside(path, folder)), key=len, default=None)


def fault_of(path, name, is_neighbour):
    """Why `path` may not include `name`; None when it may. is_neighbour: a file of that name lies beside `path`."""
    for header, places in CONFINED.items():
        if (name == header or (header.endswith("/") and name.startswith(header))) and not any(inside(path, p) for p in places):
            return f"{header} may be included from {', '.join(places) or 'tests alone'} only"
    mine, other = layer_of(path), layer_of(name)
    if name.startswith("tests/"):
        return "product code may not include tests"
    if other is None:
        if is_neighbour:
            return "project headers are included by their path from the root"
        return None  # a library's header
    # What lies in a layer below the one named (runtime -> runtime/core) is judged as its own layer.
    if mine == other or any(layer_of(place) == other and inside(name, place) for place in ALLOWED[mine]):
        return None
    return f"{mine} may include {', '.join(ALLOWED[mine]) or 'nothing of the project'} only"


def check(root):
    """(number of files, list of faults)"""
    root, files, faults = pathlib.Path(root), 0, []
    tops = sorted({folder.split("/")[0] for folder in ALLOWED})
    for file in sorted(f for top in tops for f in (root / top).rglob("*") if f.suffix in SUFFIXES):
        files += 1
        path = file.relative_to(root).as_posix()
        text = file.read_text(encoding="utf-8")
        for m in INCLUDE.finditer(text):
            name = m.group(1) or m.group(2)
            if why := fault_of(path, name, (file.parent / name).is_file()):
                faults.append(f"{path}:{text.count(chr(10), 0, m.start()) + 1}: {m.group(0).strip()}: {why}")
    return files, faults


def self_test():
    cases = [  # file, include line, allowed?
        ("parallel/a.cc", '#include "model/decoder.h"', False),
        ("parallel/a.cc", '#include "runtime/core/status.h"', True),
        ("parallel/a.cc", "#include <mpi.h>", True),
        ("parallel/a.cc", '#include "runtime/engine.h"', False),
        ("cache/a.cc", '#include "parallel/communicator.h"', False),
        ("attention/a.h", '#include "cache/kv_view.h"', True),
        ("attention/a.h", '#include "cache/kv_pool.h"', False),
        ("attention/a.h", '  #  include <cache/kv_pool.h>', False),
        ("model/a.cc", '#include "attention/attention_backend.h"', True),
        ("model/a.cc", '#include "runtime/engine.h"', False),
        ("model/checkpoint/a.cc", '#include "launch/command_line.h"', False),
        ("runtime/a.cc", '#include "attention/attention_backend.h"', False),
        ("runtime/a.cc", '#include "model/decoder.h"', True),
        ("runtime/a.cc", '#include "runtime/core/log.h"', True),
        ("runtime/core/a.cc", '#include "runtime/request.h"', False),
        ("runtime/core/a.cc", '#include "cache/kv_view.h"', False),
        ("launch/a.cc", '#include "runtime/engine.h"', True),
        ("launch/a.cc", '#include "tests/fake.h"', False),
        ("launch/a.cc", "#include <mpi.h>", False),
        ("launch/a.cc", '#include "main.h"', False),
        ("launch/a.cc", '#include "../model/decoder.h"', False),
        ("model/a.cc", '#include "utf8proc.h"', True),
        ("model/a.cu", '#include "launch/run.h"', False),
        ("model/a.cc", "#include <gtest/gtest.h>", False),
        ("model/a.cc", '#include "absl/status/status.h"', True),
        ("model/a.cc", "#include <vector>", True),
        ("model/a.cc", '// #include "launch/run.h"', True),
    ]
    wrong = 0
    for path, line, allowed in cases:
        with tempfile.TemporaryDirectory() as root:
            file = pathlib.Path(root, path)
            file.parent.mkdir(parents=True)
            file.write_text(f"// first line\n{line}\n")
            for neighbour in ("launch/main.h", "model/decoder.h"):
                pathlib.Path(root, neighbour).parent.mkdir(exist_ok=True)
                pathlib.Path(root, neighbour).write_text("#pragma once\n")
            files, faults = check(root)
            if files != 3 or (faults == []) != allowed or not all(f.startswith(f"{path}:2: ") for f in faults):
                print(f"self-test: {path} with {line}: got {faults or 'no fault'}")
                wrong += 1
    print(f"self-test: {len(cases) - wrong} of {len(cases)} cases right")
    return 1 if wrong else 0


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    root = sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent
    files, faults = check(root)
    for fault in faults:
        print(fault)
    print(f"{files} files, {len(faults)} forbidden includes")
    return 1 if faults or files == 0 else 0


sys.exit(main())
