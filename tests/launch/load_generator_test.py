#!/usr/bin/env python3
"""`lockstep serve` under locust, a public load generator, in a virtual environment of the test's own.

usage: load_generator_test.py LOCKSTEP SOURCE_DIR VENV [SECONDS [CLIENTS]]

VENV is made when it is not there, and kept. Where the package cannot be installed, exit 77 says why. Prints what locust
measured; its Python takes most of the cores, so that the times are its own, too.
"""
import json, os, pathlib, shutil, subprocess, sys, tempfile

import own_venv
from command_harness import LOCKSTEP, SOURCE, write_tokenizer
from serve_harness import Server, metric

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOKENS = 20


def main():
    locust = own_venv.make(sys.argv[3], "locust>=2.20", "locust").parent / "locust"
    seconds, clients = (sys.argv[4:] + ["5", "32"][len(sys.argv) - 4:])[:2]
    with tempfile.TemporaryDirectory() as scratch:
        model = pathlib.Path(scratch, "model")
        model.mkdir()
        shutil.copy(SOURCE / "tests/data/tiny-llama/config.json", model)
        write_tokenizer(model)
        (model / "template.jinja").write_text(TEMPLATE)
        with Server(LOCKSTEP, SOURCE, model, "--served-model-name", "tiny", "--chat-template", model / "template.jinja",
                    "--null-step-ms", 2, ranks=2) as server:
            run = subprocess.run(
                [str(locust), "-f", str(SOURCE / "tests/launch/locust_user.py"), "--headless", "--only-summary", "--users", clients,
                 "--spawn-rate", clients, "--run-time", seconds + "s", "--stop-timeout", "10", "--json",
                 "--host", f"http://127.0.0.1:{server.port}"],
                env={**os.environ, "LOCKSTEP_TOKENS": str(TOKENS)}, capture_output=True, text=True, timeout=float(seconds) + 60)
            assert run.returncode == 0, run.stderr[-3000:]  # 1: a request failed
            rows = json.loads(run.stdout)
            for row in rows:
                print(f"{row['name']:40} {row['num_requests']:6} requests, {row['num_failures']} failures, ms:",
                      f"mean {row['total_response_time'] / row['num_requests']:.0f}, most {row['max_response_time']:.0f}")
            counts = {row["name"]: row["num_requests"] for row in rows}
            answers = sum(counts[name] for name in ("/v1/completions", "/v1/completions (stream)", "/v1/chat/completions (stream)"))
            assert answers >= int(clients) and min(counts.values()) > 0, counts
            samples = server.metrics()
            served = metric(samples, "lockstep:request_success_total", finished_reason="length")
            assert served == answers, (served, counts)
            assert metric(samples, "lockstep:generation_tokens_total") == TOKENS * served
            for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_used_blocks", "http_requests_open"):
                assert metric(samples, "lockstep:" + gauge) == 0, gauge


if __name__ == "__main__":
    main()
