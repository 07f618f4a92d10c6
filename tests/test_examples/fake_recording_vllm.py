"""Stand-in for ``vllm serve`` with ``Extension``: ``fake_recording_vllm.py PORT MODEL``.

The file ``behaviour.json`` in the model's folder sets the server's faults: ``noise`` on the logits,
a ``lie`` in nats about log-probabilities, surplus ``rows``, ``nan`` logits, a number of
``linears``, or an ``error`` that the server logs before it exits.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 320
# Noise that rounded activations add, by format; each further term takes 9 tenths off.
ROUNDING_NOISE = {"fp8": 0.008} | {terms: 0.04 / 10 ** (terms - 1) for terms in (1, 2, 3, 4)}
windows = []
rounding = []  # the format, if there is rounding


def behaviour():
    file = Path(sys.argv[2]) / "behaviour.json"
    does = json.loads(file.read_text()) if file.is_file() else {}
    return does | {"noise": does.get("noise", 0.0) + sum(map(ROUNDING_NOISE.__getitem__, rounding))}


def logits_of(window, noise=0.0):
    """Logits after each token of a window except the last, float32; noise has a fixed direction."""
    seeds = [np.random.default_rng(int(token)) for token in window[:-1]]
    rows = [draws.normal(size=(2, VOCABULARY)) for draws in seeds]
    return np.array([2 * row[0] + noise * row[1] for row in rows], dtype=np.float32)


def logprobs_of(logits, tokens):
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return logprobs[np.arange(len(tokens)), tokens]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        does = behaviour()
        if self.path == "/v1/completions":
            windows.append(body["prompt"])
            logits = logits_of(body["prompt"], does["noise"])
            logprobs = logprobs_of(logits, body["prompt"][1:]) + does.get("lie", 0.0)
            answer = {"token_logprobs": [None, *logprobs.tolist()]}
            self._answer({"choices": [{"logprobs": answer}]})
            return
        assert self.path == "/collective_rpc"
        calls = []
        if body["method"] == "round_activations":
            rounding[:] = body["args"]
            calls = str(does.get("linears", 14))  # as vLLM answers what is no list
        if body["method"] == "write_logits":
            file, rows = body["args"]
            logits = logits_of(windows.pop(), does["noise"])
            assert len(logits) == rows
            calls = [len(logits) + does.get("rows", 0), 1]
            if does.get("nan"):
                logits[-1, 0] = np.nan
            if calls[0] == rows:
                save_file({"logits": logits}, file)
        self._answer({"results": [calls]})

    def _answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    if "error" in behaviour():
        sys.exit(f"(Worker pid=1) ERROR 01-01 00:00:00 [x.py:1] {behaviour()['error']}")
    print("(Worker pid=1) INFO [x.py:1] nvfp4-tc: o_proj ×1: gemm/reference (cpu)", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
