"""What the tests of the commands share: runs of the binary, and the small model that they run on.

The model is tests/data/tiny-llama with dummy weights, beside which each test writes the files it is about: a byte-level
tokenizer whose token i is byte i, a generation_config.json, a broken checkpoint.
"""
import array, json, math, os, pathlib, shutil, struct, subprocess, sys, tempfile, unittest

LOCKSTEP = os.path.abspath(sys.argv[1])
SOURCE = pathlib.Path(sys.argv[2]).resolve()
RUN = SOURCE / "launch/run.sh"
DUMMY = ["--load-format", "dummy", "--dtype", "float32"]
GREEDY = ["--temperature", "0", "--json"]


class Result:
    def __init__(self, process):
        self.status, self.out, self.err = process.returncode, process.stdout, process.stderr.decode()

    def json_lines(self):
        return [json.loads(line) for line in self.out.decode().splitlines()]

    def errors(self):
        return [line for line in self.err.splitlines() if line.startswith("lockstep error:")]


def lockstep(*args, ranks=None, stdin=b"", **options):
    """Runs the binary itself, or under mpirun when ranks is given."""
    command = [LOCKSTEP] if ranks is None else ["bash", str(RUN), "-n", str(ranks)]
    env = dict(os.environ, LOCKSTEP=LOCKSTEP, CUDA_VISIBLE_DEVICES="")  # the commands on CPUs, whatever is built or there
    return Result(subprocess.run(command + [str(a) for a in args], input=stdin, env=env, timeout=120,
                                 **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}))


def byte_letters():
    """The printable letter that byte-level BPE writes for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, spare = {}, 256
    for byte in range(256):
        if byte in printable:
            letters[byte] = chr(byte)
        else:
            letters[byte], spare = chr(spare), spare + 1
    return letters


def write_tokenizer(folder, **more):
    """Token i is byte i; 300 is <s>, put before a prompt; 301 ends a turn."""
    special = lambda i, text: {"id": i, "content": text, "special": True, "normalized": False, "lstrip": False,
                               "rstrip": False, "single_word": False}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [special(300, "<s>"), special(301, "</turn>")], "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {"type": "TemplateProcessing",
                           "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [300], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {letter: byte for byte, letter in byte_letters().items()}, "merges": []}, **more}))


def write_weights(model, values):
    """model.safetensors with F32 values(name, count) for every tensor that tests/data/tiny-llama needs."""
    shapes = {"model.embed_tokens.weight": [320, 48], "model.norm.weight": [48], "lm_head.weight": [320, 48]}
    for layer in ("model.layers.0.", "model.layers.1."):
        for name, shape in {"input_layernorm": [48], "post_attention_layernorm": [48],
                            "self_attn.q_proj": [48, 48], "self_attn.k_proj": [24, 48], "self_attn.v_proj": [24, 48],
                            "self_attn.o_proj": [48, 48], "mlp.gate_proj": [96, 48], "mlp.up_proj": [96, 48],
                            "mlp.down_proj": [48, 96]}.items():
            shapes[f"{layer}{name}.weight"] = shape
    header, data = {}, b""
    for name, shape in shapes.items():
        content = array.array("f", values(name, math.prod(shape))).tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


class Commands(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.scratch.name)
        self.model = self.folder / "model"
        self.model.mkdir()
        shutil.copy(SOURCE / "tests/data/tiny-llama/config.json", self.model)

    def tearDown(self):
        self.scratch.cleanup()

    def generate(self, *args, ranks=None, **options):
        return lockstep("generate", self.model, *DUMMY, *args, ranks=ranks, **options)

    def answers(self, *args, ranks=None):
        result = self.generate(*args, ranks=ranks)
        self.assertEqual(result.status, 0, result.err)
        return result.json_lines()

    def assert_refused(self, result, *pieces):
        """Exit 2, nothing on stdout, exactly one message, which holds the pieces."""
        self.assertEqual((result.status, result.out), (2, b""), result.err)
        self.assertEqual(len(result.errors()), 1, result.err)
        for piece in pieces:
            self.assertIn(piece, result.err)

    def edit_config(self, **changes):
        path = self.model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def main():
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
