"""Stand-in for ``vllm serve``: ``fake_vllm.py PORT [REPORT LINE]``.

Token ``t`` of a prompt has log-probability ``-t / 100``; completions repeat ``x``.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions"
        if body["prompt"] == "fail":
            self._answer({"error": "no such luck"}, status=400)
        elif body.get("echo"):
            assert (body["max_tokens"], body["logprobs"]) == (0, 0)
            logprobs = [None, *(-token / 100 for token in body["prompt"][1:])]
            self._answer({"choices": [{"logprobs": {"token_logprobs": logprobs}}]})
        else:
            assert body["seed"] == 0
            count = body["max_tokens"]
            choices = [{"text": "x" * count}]
            self._answer({"choices": choices, "usage": {"completion_tokens": count}})

    def _answer(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    print("(Worker pid=1) INFO 01-01 00:00:00 [config.py:1]", *sys.argv[2:], flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
