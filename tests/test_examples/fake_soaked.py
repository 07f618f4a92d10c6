"""Stand-in for a server under load, sound or with one flaw: ``fake_soaked.py PORT [FLAW]``.

Its engine is an idle child process.
"""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_MODEL_LEN = 64
LONG = 40  # tokens of an answer that lasts as long as the engine
EVERY = 5  # of requests of a kind, the one that a flaw strikes
ENGINE = "import signal; signal.pause()  # EngineCore"
FLAWS = ("loses", "cuts", "shortens", "errs", "accepts", "forgets", "leaks", "keeps", "hangs")


class Fake(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, flaw: str = "") -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.flaw, self.kept = flaw, []
        self.counts = {key: itertools.count(1) for key in ("whole", "stream", "any")}
        self.engine_is_dead = threading.Event()

    def strikes(self, flaw: str, kind: str) -> bool:
        """Whether the server has this flaw and shows it now, as one request in ``EVERY`` does."""
        return self.flaw == flaw and next(self.counts[kind]) % EVERY == 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def do_GET(self) -> None:
        running = 1 if self.server.flaw == "keeps" else 0
        self._answer(
            f'vllm:num_requests_running{{engine="0"}} {running}.0\n'
            'vllm:num_requests_waiting{engine="0"} 0.0\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.0\n'
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            tokens = [ord(c) % 100 for c in body["prompt"]]
            self._answer({"tokens": tokens, "max_model_len": MAX_MODEL_LEN})
            return
        count, prompt = body.get("max_tokens", 1), body.get("prompt")
        is_well_formed = isinstance(prompt, list) and body["model"] == "demo"
        is_long = is_well_formed and len(prompt) + count > MAX_MODEL_LEN
        if not is_well_formed or (is_long and self.server.flaw != "accepts"):
            self._answer({"error": {"message": "malformed"}}, status=400)
            return
        if self.server.strikes("loses", "any"):
            threading.Event().wait()
        if self.server.strikes("errs", "any"):
            self._answer({"error": {"message": "no such luck"}}, status=500)
            return
        if self.server.flaw == "leaks":  # for seconds: a pause of the machine must not hide it
            self.server.kept.append(b"\1" * (1 << 20))
            time.sleep(0.06)
        if count >= LONG:
            self.server.engine_is_dead.wait()
        time.sleep(0.005)
        text = str(sum(prompt))
        if self.server.flaw == "forgets":
            text += str(os.getpid())
        if body.get("stream"):
            self._stream(count)
        else:
            got = count - self.server.strikes("shortens", "whole")
            n = body.get("n", 1)
            choices = [{"index": i, "text": text, "finish_reason": "length"} for i in range(n)]
            self._answer({"choices": choices, "usage": {"completion_tokens": n * got}})

    def _stream(self, count: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for part in self._parts(count):
            self.wfile.write(f"data: {part if part == '[DONE]' else json.dumps(part)}\n\n".encode())
        self.close_connection = True

    def _parts(self, count: int) -> Iterator[object]:
        cut = self.server.strikes("cuts", "stream")
        for i in range(count):
            reason = "length" if i == count - 1 and not cut else None
            yield {"choices": [{"index": 0, "text": "x", "finish_reason": reason}]}
        yield {"choices": [], "usage": {"completion_tokens": count}}
        yield "[DONE]"

    def _answer(self, body: object, status: int = 200) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def main(port: int, flaw: str = "") -> None:
    server = Fake(port, flaw)
    engine = subprocess.Popen([sys.executable, "-c", ENGINE])

    def watch() -> None:
        engine.wait()
        if flaw != "hangs":
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
