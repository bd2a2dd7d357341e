#!/usr/bin/env python3
"""Launch mistakes: ranks of another program, other options or another model, and ranks that do not know of each other.

usage: launch_check_test.py LOCKSTEP SOURCE_DIR [unittest options]        standard library only
"""
import json, os, shutil, subprocess

from command_harness import DUMMY, LOCKSTEP, RUN, SOURCE, Commands, Result, lockstep, main, write_weights

PLAIN = ["--dtype", "float32"]
RANKS = ((2, 1), (3, 1), (3, 2))  # how many, and which one is started otherwise


class LaunchCheckTest(Commands):
    def start(self, ranks, odd, arguments, odd_arguments, odd_program=LOCKSTEP, command="generate"):
        """All ranks but `odd` are `LOCKSTEP command MODEL arguments`."""
        quote = lambda words: " ".join(f"'{word}'" for word in words)
        wrapper = self.folder / "wrapper"
        wrapper.write_text(f'#!/bin/sh\nif [ "$OMPI_COMM_WORLD_RANK" = {odd} ]; then\n'
                           f'exec {quote([odd_program, *odd_arguments])}\nfi\n'
                           f'exec {quote([LOCKSTEP, command, self.model, *arguments])}\n')
        wrapper.chmod(0o755)
        env = dict(os.environ, LOCKSTEP=str(wrapper), CUDA_VISIBLE_DEVICES="")
        return Result(subprocess.run(["bash", str(RUN), "-n", str(ranks)], env=env, timeout=120, stdin=subprocess.DEVNULL,
                                     capture_output=True))

    def refuse_options(self, more, odd_more, *pieces):
        common = [*DUMMY, "--ids", "1", "--max-tokens", "2"]
        for ranks, odd in RANKS:
            result = self.start(ranks, odd, common + more, ["generate", self.model, *common, *odd_more])
            self.assert_refused(result, f"rank {odd} (", *pieces)

    def refuse_model(self, change, *pieces):
        """change(folder) makes of a copy of the model that of the odd rank."""
        other = self.folder / "other"
        common = [*PLAIN, "--ids", "1", "--max-tokens", "2"]
        for ranks, odd in RANKS:
            shutil.rmtree(other, ignore_errors=True)
            shutil.copytree(self.model, other)
            change(other)
            self.assert_refused(self.start(ranks, odd, common, ["generate", other, *common]), f"rank {odd} (", *pieces)

    def test_program(self):
        other = self.folder / "lockstep"
        shutil.copy(LOCKSTEP, other)
        with open(other, "ab") as file:
            file.write(b"x")
        common = [*DUMMY, "--ids", "1", "--max-tokens", "2"]
        size = os.path.getsize(LOCKSTEP)
        for ranks, odd in RANKS:
            result = self.start(ranks, odd, common, ["generate", self.model, *common], odd_program=other)
            self.assert_refused(result, f"rank {odd} (", "the program is", f"of {size + 1} bytes", f"of {size} bytes")
        shutil.copy(LOCKSTEP, other)  # the same program in another place
        result = self.start(2, 1, common, ["generate", self.model, *common], odd_program=other)
        self.assertEqual(result.status, 0, result.err)

    @classmethod
    def setUpClass(cls):
        """Neither MPI nor mpirun ends a job of which one process is no rank. It waits while the other tests run."""
        script = f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && exec sleep 60; exec "{LOCKSTEP}" "$@"'
        command = ["mpirun", "-q", "--allow-run-as-root", "--oversubscribe", "-np", "3", "sh", "-c", script, "sh", "generate",
                   SOURCE / "tests/data/tiny-llama", *DUMMY, "--ids", "1", "--watchdog-seconds", "1"]
        env = dict(os.environ, OMPI_MCA_mpi_yield_when_idle="1", OMPI_MCA_hwloc_base_binding_policy="none", CUDA_VISIBLE_DEVICES="")
        cls.incomplete = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    @classmethod
    def tearDownClass(cls):
        cls.incomplete.terminate()
        cls.incomplete.communicate()

    def test_rank_that_never_comes(self):
        out, err = self.incomplete.communicate(timeout=60)
        self.assertEqual((self.incomplete.returncode, out), (1, b""), err)
        self.assertEqual(err.count(b"lockstep error:"), 1, err)
        self.assertRegex(err.decode(), r"rank 0 \(\S+\) has not found all other ranks within 10 s")

    def test_command(self):
        for ranks, odd in RANKS:
            result = self.start(ranks, odd, [*DUMMY, "--ids", "1"], ["score", self.model, *DUMMY, "--ids", "1"])
            self.assert_refused(result, f"rank {odd} (", "the command is score here and generate on rank 0")

    def test_options(self):
        self.refuse_options(["--block-size", "32"], ["--block-size", "16"], "--block-size is 16 here and 32 on rank 0")
        self.refuse_options(["--max-num-seqs=4"], [], "--max-num-seqs is missing here and 4 on rank 0")
        self.refuse_options([], ["--poison-freed-blocks"], "--poison-freed-blocks is given here and missing on rank 0")
        self.refuse_options([], ["--load-format", "auto"], "--load-format is auto here and dummy on rank 0")
        # A refusal of what one rank alone was given comes before any comparison.
        self.refuse_options([], ["--block-size", "17"], "--block-size 17", "power of two")
        for ranks, odd in RANKS:
            tp = lambda n: [*DUMMY, "--ids", "1", "--tp", str(n)]
            result = self.start(ranks, odd, tp(ranks), ["generate", self.model, *tp(ranks + 1)])
            self.assert_refused(result, f"rank {odd} (", f"--tp {ranks + 1}, but {ranks} ranks were started")

    def test_what_is_rank_0s_may_differ(self):
        everywhere = [*DUMMY, "--block-size", "8", "--max-model-len", "64"]
        rank0 = ["--ids", "1,2", "--max-tokens", "5", "--temperature", "0", "--json", "--tp", "2", "--threads", "1", "--log-level",
                 "warning", "--step-log", self.folder / "steps"]
        copy = self.folder / "copy"  # another place of the same model
        shutil.copytree(self.model, copy)
        text = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**text, "_name_or_path": "x", "transformers_version": "y"}, indent=7))
        result = self.start(2, 1, everywhere + rank0,
                            ["generate", f"{copy}/", "--ids", "9", *reversed_pairs(everywhere), "--threads", "2"])
        self.assertEqual((result.status, result.err), (0, ""))
        self.assertEqual(len(result.json_lines()[0]["token_ids"]), 5)

    def test_config(self):
        edit = lambda **changes: lambda folder: (folder / "config.json").write_text(
            json.dumps({**json.loads((folder / "config.json").read_text()), **changes}))
        write_weights(self.model, lambda name, count: [0.01] * count)
        self.refuse_model(edit(rms_norm_eps=0.125), "the model's rms_norm_eps is 0.125 here and 1e-", "on rank 0")
        self.refuse_model(edit(rope_theta=77.5), "the model's rope_theta is 77.5 here and ", "on rank 0")

    def test_weights(self):
        fill = lambda value: lambda name, count: [value] * count
        write_weights(self.model, fill(0.01))
        # Of the same names, types and shapes: another training.
        self.refuse_model(lambda folder: write_weights(folder, fill(0.02)), "tensor lm_head.weight is F32 [320, 48]", "digest")

        def one_tensor_more(folder):
            path = folder / "model.safetensors"
            data = path.read_bytes()
            length = int.from_bytes(data[:8], "little")
            header, data = json.loads(data[8:8 + length]), data[8 + length:]
            header["zero"] = {"dtype": "U8", "shape": [3], "data_offsets": [len(data), len(data) + 3]}
            text = json.dumps(header).encode()
            text += b" " * (length - len(text) % 8)
            path.write_bytes(len(text).to_bytes(8, "little") + text + data + bytes(3))
        self.refuse_model(one_tensor_more, "tensor lm_head.weight is F32 [320, 48], 61440 bytes at ")


def reversed_pairs(options):
    return [word for i in range(len(options) - 2, -1, -2) for word in options[i:i + 2]]


class AloneTest(Commands):
    """Processes that a launcher started, of which MPI knows nothing, each the whole job to itself."""

    def run_alone(self, variables):
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI", "OMPI_"))}
        command = [LOCKSTEP, "generate", str(self.model), *DUMMY, "--ids", "1", "--max-tokens", "2"]
        return Result(subprocess.run(command, env={**env, "CUDA_VISIBLE_DEVICES": "", **variables}, timeout=60,
                                     stdin=subprocess.DEVNULL, capture_output=True))

    def test_one_of_several_tells(self):
        for size, rank, more in (("PMI_SIZE", "PMI_RANK", {}), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", {"SLURM_NTASKS": "4"}),
                                 ("SLURM_NTASKS", "SLURM_PROCID", {}),
                                 ("SLURM_STEP_NUM_TASKS", "PMIX_RANK", {})):  # MPI does not find the server of PMIx
            with self.subTest(size):
                self.assert_refused(self.run_alone({size: "4", rank: "0", **more}), f"{size} is 4", "mpirun -np N", "srun --mpi=pmix")
                other = self.run_alone({size: "4", rank: "3", **more})
                self.assertEqual((other.status, other.out, other.errors()), (2, b"", []), other.err)

    def test_one_rank_on_purpose(self):
        for variables in ({"PMI_SIZE": "1", "PMI_RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}):
            result = self.run_alone(variables)
            self.assertEqual(result.status, 0, result.err)
        os.environ["SLURM_NTASKS"] = "4"  # mpirun in an allocation of 4 tasks
        self.addCleanup(os.environ.pop, "SLURM_NTASKS")
        result = lockstep("generate", self.model, *DUMMY, "--ids", 1, "--max-tokens", 2, ranks=1)
        self.assertEqual(result.status, 0, result.err)


if __name__ == "__main__":
    main()
