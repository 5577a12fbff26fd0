"""A program with the interface of llama-server that `clearhead bench serve` uses: /health, and /completion as a stream.

    python fake_llama_server.py --model x.gguf --port 8080 ...

Every third token is held back and counted in the next event, as llama-server does with incomplete characters. A prompt
that starts with 0 is refused. A model whose name contains "broken" ends the program; one whose name contains "closing"
closes the connection after each answer without having said so, as llama-server does after streams.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OPTIONS = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
STARTED = time.monotonic()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 1  # seconds until it closes a connection without a request

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        ready = time.monotonic() - STARTED > 0.2  # a model takes time to load
        self.send_response(200 if ready else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["prompt"][0] == 0:
            message = b'{"error": "a prompt that starts with 0"}'
            self.send_response(400)
            self.send_header("Content-Length", str(len(message)))
            self.end_headers()
            self.wfile.write(message)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.send_event({"tokens": [], "tokens_predicted": 0})
        for number in range(1, request["n_predict"] + 1):
            time.sleep(0.002)
            if number % 3:
                self.send_event({"tokens": [7], "tokens_predicted": number})
        self.send_event({"stop": True, "tokens_predicted": request["n_predict"], "options": OPTIONS})
        self.wfile.write(b"0\r\n\r\n")
        self.close_connection = "closing" in OPTIONS["--model"]

    def send_event(self, event):
        """Send an event in two chunks, and the second chunk in two parts."""
        data = f"data: {json.dumps(event)}\n\n".encode()
        for part in (data[:9], data[9:]):
            chunk = f"{len(part):x}\r\n".encode() + part + b"\r\n"
            self.wfile.write(chunk[:11])
            self.wfile.flush()
            time.sleep(0.0005)
            self.wfile.write(chunk[11:])


if "broken" in OPTIONS["--model"]:
    sys.exit("loading\nerror: unknown model architecture\nmain: exiting")
ThreadingHTTPServer(("127.0.0.1", int(OPTIONS["--port"])), Handler).serve_forever()
