#!/usr/bin/env python3
"""launch/scaling.sh and the report: numbers that agree with each other and with the results, and what is refused.

usage: scaling_test.py LOCKSTEP SOURCE_DIR [TEST...]        standard library only
"""
import csv, html.parser, json, math, re, subprocess, os, xml.etree.ElementTree

from command_harness import LOCKSTEP, SOURCE, Commands, Result, lockstep, main

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(html.parser.HTMLParser):
    """Every tag is closed by its own; figures, references and text are kept."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.references, self.captions, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] == "figcaption":
            self.captions.append(data)


class ScalingTest(Commands):
    DUMMY = ["--", "--load-format", "dummy", "--dtype", "float32", "--device", "cpu"]
    SMALL = ["--batch-sizes", "1,3", "--input-len", "20", "--output-len", "5", "--warmup", "1", "--repeats", "2", "--num-prompts", "4"]

    def scaling(self, *args, model=None, engine=DUMMY):
        command = ["bash", str(SOURCE / "launch/scaling.sh"), model or self.model, *args, *engine]
        env = dict(os.environ, LOCKSTEP=LOCKSTEP, CUDA_VISIBLE_DEVICES="")
        return Result(subprocess.run([str(a) for a in command], env=env, timeout=400, stdin=subprocess.DEVNULL,
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE))

    def assert_told(self, result, *pieces, status=2):
        self.assertEqual(result.status, status, result.err)
        for piece in pieces:
            self.assertIn(piece, result.err)

    def check_numbers(self, report, out):
        """The report's numbers against each other and against the files they come from."""
        base = {}
        for row in report["latency"]:
            result = json.loads((out / f"latency.n{row['num_ranks']}.b{row['batch_size']}.json").read_text())
            self.assertEqual(row["ms"], result["prefill_ms" if row["phase"] == "prefill" else "step_ms"]["median"])
            tokens = row["batch_size"] * (result["input_len"] if row["phase"] == "prefill" else 1)
            self.assertTrue(math.isclose(row["tokens_per_second"], tokens / row["ms"] * 1000))
            first = base.setdefault((row["phase"], row["batch_size"]), row)
            self.assertEqual(row["base_ranks"], first["num_ranks"])
            self.assertTrue(math.isclose(row["speedup"], first["ms"] / row["ms"]))
            self.assertTrue(math.isclose(row["efficiency"], row["speedup"] / (row["num_ranks"] / row["base_ranks"])))
        first = report["throughput"][0]
        for row in report["throughput"]:
            result = json.loads((out / f"throughput.n{row['num_ranks']}.json").read_text())
            self.assertEqual(row["elapsed_seconds"], result["elapsed_time"])
            self.assertTrue(math.isclose(row["requests_per_second"], result["requests_per_second"]))
            self.assertTrue(math.isclose(row["output_tokens_per_second"], result["output_tokens_per_second"]))
            self.assertTrue(math.isclose(row["tokens_per_second_per_rank"], result["tokens_per_second_per_rank"]))
            self.assertTrue(math.isclose(row["speedup"], first["elapsed_seconds"] / row["elapsed_seconds"]))

    def check_csv(self, report, out):
        with open(out / "report.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(list(rows[0]), ["section", "phase", "name", "num_ranks", "batch_size", "x", "metric", "unit", "value"])
        number = {(r["section"], r["phase"], r["num_ranks"], r["batch_size"], r["metric"]): float(r["value"])
                  for r in rows if r["section"] in ("latency", "throughput", "sameness") and not r["x"]}
        units = {r["metric"]: r["unit"] for r in rows}
        self.assertEqual((units["ms"], units["tokens_per_second"], units["speedup"]), ("ms", "tokens/s", "1"))
        for row in report["latency"]:
            for metric in ("ms", "spread", "tokens_per_second", "speedup", "efficiency"):
                key = ("latency", row["phase"], str(row["num_ranks"]), str(row["batch_size"]), metric)
                self.assertEqual(number.pop(key), row[metric], key)
        for section in ("throughput", "sameness"):
            for row in report[section]:
                for metric, value in row.items():
                    if metric not in ("num_ranks", "base_ranks", "partings"):
                        self.assertEqual(number.pop((section, "", str(row["num_ranks"]), "", metric)), value)
        self.assertEqual(number, {})

    def check_fit(self, report, out):
        fit = report["fit"]
        self.assertTrue(fit["made"])
        self.assertEqual([p["name"] for p in fit["parameters"]], ["bytes", "operations", "host", "sum_latency", "sum_bytes"])
        self.assertTrue(all(p["value"] >= 0 and (p["value"] > 0) == (p["state"] == "fitted") for p in fit["parameters"]))
        self.assertEqual(fit["num_free_parameters"], sum(p["state"] in ("fitted", "zero") for p in fit["parameters"]))
        measured = {(r["phase"], r["batch_size"], r["num_ranks"]): r for r in report["latency"]}
        self.assertEqual(fit["num_points"], len(measured))
        for point in fit["points"] + fit["predictions"]:
            self.assertTrue(math.isclose(sum(point["parts_ms"].values()), point["fitted_ms"]), point)
            if point["num_ranks"] == 1:
                self.assertEqual((point["parts_ms"]["sum_latency"], point["parts_ms"]["sum_bytes"]), (0, 0))
        for point in fit["points"]:
            row = measured.pop((point["phase"], point["batch_size"], point["num_ranks"]))
            self.assertTrue(math.isclose(point["measured_ms"], row["ms"]))
            self.assertTrue(math.isclose(point["error"], point["fitted_ms"] / row["ms"] - 1, abs_tol=1e-12))
        for point in fit["predictions"]:
            base = next(r for r in report["latency"] if (r["phase"], r["batch_size"]) == (point["phase"], point["batch_size"]))
            self.assertIs(point["predicted"], True)
            self.assertNotIn(point["num_ranks"], report["measured_ranks"])
            self.assertTrue(math.isclose(point["speedup"], base["ms"] / point["fitted_ms"]))
            self.assertTrue(math.isclose(point["efficiency"], point["speedup"] / (point["num_ranks"] / base["num_ranks"])))
        with open(out / "report.csv", newline="") as file:
            rows = [r for r in csv.DictReader(file) if r["metric"] == "fitted_ms"]
        for section, name in (("fit", "points"), ("prediction", "predictions")):
            self.assertEqual([(r["phase"], r["batch_size"], r["num_ranks"], float(r["value"])) for r in rows if r["section"] == section],
                             [(p["phase"], str(p["batch_size"]), str(p["num_ranks"]), p["fitted_ms"]) for p in fit[name]])

    def check_emulated(self, report, out):
        self.assertEqual([(r["phase"], r["batch_size"], r["num_ranks"]) for r in report["emulated"]],
                         [(phase, batch, 3) for phase in ("prefill", "decode") for batch in (1, 3)])
        for row in report["emulated"]:
            result = json.loads((out / f"emulated.n3.b{row['batch_size']}.json").read_text())
            self.assertEqual((result["emulated"], result["num_ranks"]), ({"tp_size": 3, "rank": 0}, 1))
            base = next(r for r in report["latency"] if (r["phase"], r["batch_size"]) == (row["phase"], row["batch_size"]))
            self.assertEqual(row["ms"], result["prefill_ms" if row["phase"] == "prefill" else "step_ms"]["median"])
            self.assertTrue(math.isclose(row["speedup"], base["ms"] / row["ms"]))
            self.assertTrue(math.isclose(row["efficiency"], row["speedup"] / 3))
        self.assertIn("measured on one rank without all-reduces", (out / "report.html").read_text())

    def check_parts(self, report):
        """Parts are what a step is made of. Empty where this lockstep has no --profile, or no bench collectives."""
        for profile in report["profile"]:
            self.assertEqual(len(profile["ranks"]), profile["num_ranks"])
            for rank in profile["ranks"]:
                self.assertTrue(math.isclose(sum(rank["parts_ms"].values()), rank["step_ms"], rel_tol=0.01), rank)
        for row in report["collectives"]:
            n = row["num_ranks"]
            self.assertTrue(math.isclose(row["busbw_bytes_per_second"], row["algbw_bytes_per_second"] * 2 * (n - 1) / n))

    def check_page(self, out, captions):
        text = (out / "report.html").read_text()
        page = Page(text)
        xml.etree.ElementTree.fromstring(text.replace("<!DOCTYPE html>", ""))
        self.assertEqual(page.references, [])
        self.assertNotIn("script", page.tags)
        self.assertIsNone(re.search(r"https?:|url\(|@import", text))
        for caption in captions:
            self.assertIn(caption, page.captions)
        self.assertNotIn("nan", " ".join(page.words).split())
        self.assertIn("prefers-color-scheme: dark", text)
        return page

    def test_three_ns(self):
        out = self.folder / "a folder"
        result = self.scaling("--ranks", "4,1,2", "--emulate", "3", "--out", out, *self.SMALL)
        self.assertEqual(result.status, 0, result.err)
        self.assertEqual(result.out.decode().split("\n")[:3], [f"{out}/report.{form}" for form in ("json", "csv", "html")])
        report = json.loads((out / "report.json").read_text())
        self.assertEqual((report["baseline_ranks"], report["measured_ranks"], report["missing_ranks"]), (1, [1, 2, 4], []))
        self.assertEqual([(r["phase"], r["batch_size"], r["num_ranks"]) for r in report["latency"]],
                         [(phase, batch, n) for phase in ("prefill", "decode") for batch in (1, 3) for n in (1, 2, 4)])
        self.check_numbers(report, out)
        # float32: the same ids at every N, and log-probabilities that differ by rounding alone.
        self.assertEqual([s["num_ranks"] for s in report["sameness"]], [2, 4])
        for same in report["sameness"]:
            self.assertEqual((same["num_prompts"], same["num_same"], same["compared_tokens"], same["partings"]), (4, 4, 128, []))
            self.assertLess(same["max_logprob_difference"], 1e-4)
        self.check_csv(report, out)
        self.check_emulated(report, out)
        self.check_fit(report, out)
        self.check_parts(report)
        self.assertEqual(bool(report["profile"]), b"--profile" in lockstep("bench", "latency", "--help").out)
        self.assertEqual(bool(report["collectives"]), b"\n  collectives " in lockstep("help", "bench").out)
        self.assertEqual(report["fit"]["predictions"], [])  # 8 ranks are more than the 6 query heads
        page = self.check_page(out, [f"{what} of {phase}" for what in ("Speed-up", "Efficiency") for phase in ("prefill", "decode")])
        self.assertGreaterEqual(page.tags.count("figure"), 5)
        run = report["run"]
        self.assertEqual(run["ranks"], [1, 2, 4])
        self.assertEqual(run["engine_options"], self.DUMMY[1:])
        self.assertEqual(run["version"], json.loads(lockstep("version", "--json").out))
        self.assertGreater(run["machine"]["memory_bytes"], 1 << 20)
        self.assertGreaterEqual(len(run["commands"]), 12)
        self.assertEqual([f.name for f in out.iterdir() if f.name.startswith(".") or f.name.endswith(".log")], [])

        # Again, from the results that are there: only the missing one runs.
        self.assert_told(self.scaling("--ranks", "1,2,4", "--out", out, *self.SMALL), "is not empty")
        self.assert_told(self.scaling("--ranks", "1", "--out", out, "--resume"), "are of other options")
        (out / "latency.n2.b3.json").unlink()
        before = (out / "latency.n1.b1.json").stat().st_mtime_ns
        result = self.scaling("--ranks", "1,2,4", "--out", out, "--resume", *self.SMALL)
        self.assertEqual(result.status, 0, result.err)
        self.assertEqual(result.err.count(" rank(s): bench"), 1)
        self.assertEqual((out / "latency.n1.b1.json").stat().st_mtime_ns, before)
        self.assertEqual(json.loads((out / "report.json").read_text())["measured_ranks"], [1, 2, 4])

        # Without N = 4, that one is predicted, and told to be missing; without N = 2 there is nothing to fit.
        for n in ("4", "2"):
            for file in out.glob(f"*.n{n}.*"):
                file.unlink()
            self.assertEqual(lockstep("report", out).status, 0)
            report = json.loads((out / "report.json").read_text())
            self.assertIn(int(n), report["missing_ranks"])
            self.check_numbers(report, out)
            if n == "4":
                self.check_fit(report, out)
                self.assertEqual({p["num_ranks"] for p in report["fit"]["predictions"]}, {4})
                self.check_page(out, ["Decode step: measured, and the fit (dashed) beyond it"])
                self.assertIn("Predicted, not measured", (out / "report.html").read_text())
        self.assertFalse(report["fit"]["made"])
        self.assertIn("two numbers of ranks", report["fit"]["why_not"])
        self.assertEqual(report["sameness"], [])
        self.check_page(out, [])

    def test_an_n_that_fails_is_named_and_others_are_kept(self):
        # Eight requests do not fit side by side into what one rank holds, so nothing of N = 2 can be wrong before N = 1 is done:
        # a launcher that fails at N = 2 stands for a rank that dies.
        launcher = self.folder / "lockstep"
        launcher.write_text(f'#!/bin/sh\n[ "$OMPI_COMM_WORLD_SIZE" = 2 ] && [ "$2" != throughput ] && exit 1\nexec {LOCKSTEP} "$@"\n')
        launcher.chmod(0o755)
        out = self.folder / "out"
        command = ["bash", str(SOURCE / "launch/scaling.sh"), self.model, "--ranks", "1,2", "--out", out, *self.SMALL, *self.DUMMY]
        result = Result(subprocess.run([str(a) for a in command], env=dict(os.environ, LOCKSTEP=str(launcher)), timeout=300,
                                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        self.assert_told(result, "failed: N = 2: latency.n2.b1.json", "failed: N = 2: generate.n2.jsonl", status=1)
        report = json.loads((out / "report.json").read_text())
        self.assertEqual((report["measured_ranks"], report["missing_ranks"]), ([1], [2]))
        self.assertEqual([r["num_ranks"] for r in report["throughput"]], [1, 2])
        self.assertFalse((out / "latency.n2.b1.json").exists())
        self.assertTrue((out / "latency.n2.b1.json.log").exists())
        self.assertIn("No latency result of N = 2", (out / "report.html").read_text())

    def test_refusals(self):
        out = self.folder / "out"

        def refused(*args, pieces, **options):
            self.assert_told(self.scaling(*args, **options), *pieces)
            self.assertFalse(out.exists())
        for ranks in ("0", "1,0", "two", "1,,2", "1,2,", ",1", "-1", "1.5", "01", " 1"):
            refused("--ranks", ranks, "--out", out, pieces=[f"--ranks '{ranks}'"])
        refused("--ranks", "2,1,2", "--out", out, pieces=["2 is there twice"])
        refused("--ranks", "1,7", "--out", out, pieces=["7", "6"])  # more ranks than query heads
        refused("--ranks", "1", "--emulate", "7", "--out", out, pieces=["7", "6"])
        refused("--ranks", "1", "--emulate", "x", "--out", out, pieces=["--emulate 'x'"])
        refused("--out", out, pieces=["no --ranks"])
        refused("--ranks", "1", pieces=["no --out"])
        refused("--ranks", "1", "--out", out, "--repeats", "0", pieces=["--repeats '0'"])
        refused("--ranks", "1", "--out", out, "--batch-sizes", "x", pieces=["--batch-sizes 'x'"])
        refused("--ranks", "1", "--out", out, "--what", "2", pieces=["no option '--what'"])
        refused("--ranks", "1", "--out", out, "--resume", "--force", pieces=["not both"])
        refused("--ranks", "1", "--out", out, "--prompts", self.folder / "none", pieces=["cannot be read"])
        refused("--ranks", "1", "--out", out, model=self.folder / "none", pieces=["none"])
        # What the engine refuses is refused by the first run, and leaves nothing.
        refused("--ranks", "1", "--out", out, engine=[*self.DUMMY, "--no-such-option"], pieces=["--no-such-option"])
        (self.folder / "file").write_text("")
        self.assert_told(self.scaling("--ranks", "1", "--out", self.folder / "file"), "is no folder")

    def test_report_alone(self):
        self.assert_refused(lockstep("report", self.folder / "none"), "no such folder")
        self.assert_refused(lockstep("report", self.folder), "no latency.nN.bB.json")
        self.assert_refused(lockstep("report"), "DIR")
        self.assertIn(b"report.html", lockstep("report", "--help").out)
        self.assertEqual([f.name for f in self.folder.iterdir()], ["model"])


if __name__ == "__main__":
    main()
