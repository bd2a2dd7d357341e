#!/usr/bin/env python3
"""--check-tp and --check-attention as a user sees them. Ranks that load different weights are told apart.

usage: check_test.py LOCKSTEP SOURCE_DIR [unittest options]        standard library only
"""
import os, random, shutil, subprocess, sys, unittest

from command_test import DUMMY, LOCKSTEP, RUN, Commands, Result, lockstep, write_weights

CHECKS = ["--check-tp", "2", "--check-attention"]
PROMPT = ["--ids", "1,2,3,4,5", "--max-tokens", "4", "--temperature", "0", "--json"]


def random_weights():
    """Function of a tensor's name or None: values(name, count) for write_weights, of that tensor half as large.

    But for its middle rows: those are what ranks compare at the start, before --check-tp has a step to look at."""
    seed = random.getrandbits(32)

    def values(altered, name, count):
        numbers = random.Random(f"{seed} {name}")
        scale = 1 if "norm" in name else 0.25
        halved = [name == altered and not 3 * count <= 8 * i < 5 * count for i in range(count)]
        return [(0.5 if half else 1) * scale * (1 + numbers.gauss(0, 1)) for half in halved]
    return lambda altered: lambda name, count: values(altered, name, count)


class ChecksTest(Commands):
    def test_nothing_is_found_and_the_answers_stay(self):
        for ranks in (2, 3):
            plain = self.generate(*PROMPT, ranks=ranks)
            checked = self.generate(*PROMPT, *CHECKS, ranks=ranks)
            self.assertEqual((checked.status, checked.out), (0, plain.out), checked.err)
            self.assertIn(f"--check-tp: 2 steps, 38 tensors of each of {ranks} ranks compared with one rank's: all agree",
                          checked.err)
            for rank in range(ranks):
                self.assertIn(f'--check-attention: rank {rank}: attention backend "cpu" against "reference": 4 steps',
                              checked.err)
        scored = lockstep("score", self.model, *DUMMY, "--ids", "1,2,3", *CHECKS, ranks=2)
        self.assertEqual(scored.status, 0, scored.err)
        self.assertIn("--check-tp: 1 step, 19 tensors", scored.err)

    def test_refusals(self):
        self.assert_refused(self.generate(*PROMPT, "--check-tp", "2"), "--check-tp needs at least two ranks")
        self.assert_refused(self.generate(*PROMPT, "--check-tp", "0", ranks=2), "--check-tp 0: it must be between 1")
        self.assert_refused(self.generate(*PROMPT, "--check-attention", "--attention-backend", "reference", ranks=2),
                            "--check-attention", "reference")

    def test_a_rank_with_other_weights_is_found(self):
        """Rank 1 reads another folder, in which one tensor is half as large, but for its middle rows."""
        other = self.folder / "other"
        shutil.copytree(self.model, other)
        launcher = self.folder / "launcher"
        launcher.write_text(f'#!/bin/bash\nright={self.model} other={other}\n'
                            '[ "$OMPI_COMM_WORLD_RANK" = 1 ] && set -- "${@/#$right/$other}"\n'
                            f'exec {LOCKSTEP} "$@"\n')
        launcher.chmod(0o755)
        of = random_weights()
        write_weights(self.model, of(None))
        for tensor, place in {"model.layers.1.self_attn.o_proj.weight": "layer 1 o_proj is apart on ranks 0, 1 of 2",
                              "model.layers.0.self_attn.k_proj.weight": "layer 0 qkv is apart on rank 1 of 2",
                              "model.layers.1.mlp.up_proj.weight": "layer 1 gate_up is apart on rank 1 of 2",
                              "lm_head.weight": "logits is apart on rank 1 of 2"}.items():
            write_weights(other, of(tensor))
            command = ["bash", str(RUN), "-n", "2", "generate", str(self.model), "--dtype", "float32", *PROMPT]
            process = subprocess.run([*command, "--check-tp", "1"], env=dict(os.environ, LOCKSTEP=str(launcher)),
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
            result = Result(process)
            self.assertEqual((result.status, result.out), (1, b""), result.err)
            self.assertIn(f"--check-tp: step 1: {place}; the tolerance is ", result.errors()[0])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
