#!/usr/bin/env python3
"""Writes snippets.json: template snippets and what jinja2 makes of them, set up as Hugging Face transformers sets it up.

usage: make_snippets.py > snippets.json        (needs the Python package jinja2, 3.1)

A template has `runs`, each with its `input` (absent: the file's), and `text`, or `error` (any failure) with `raised` when the
template itself raised, with that message.
"""
import json
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

from snippets import CASES, INPUT


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Raised(Exception):
    pass


def raise_exception(message):
    raise Raised(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


def main():
    env = environment()
    templates = {}
    for entry in CASES:
        template, given = entry if isinstance(entry, tuple) else (entry, None)
        run = {} if given is None else {"input": given}
        try:
            run["text"] = env.from_string(template).render(**(INPUT if given is None else given))
        except Raised as e:
            run["error"] = str(e)
            run["raised"] = True
        except Exception as e:
            run["error"] = f"{type(e).__name__}: {e}"
        templates.setdefault(template, []).append(run)
    lines = ",\n".join(json.dumps({"template": t, "runs": r}, ensure_ascii=False) for t, r in templates.items())
    sys.stdout.write('{"input": ' + json.dumps(INPUT, ensure_ascii=False) + ',\n"templates": [\n' + lines + "\n]}\n")


main()
