"""Exits 0 where the server of this container is alive, else 1."""

import os
import sys
from http.client import HTTPConnection

port = int(os.environ.get("SHARDWRIGHT_PORT") or 8080)
connection = HTTPConnection("127.0.0.1", port, timeout=4)
try:
    connection.request("GET", "/healthz")
    status = connection.getresponse().status
except OSError as error:
    sys.exit(f"no answer on port {port}: {error}")
sys.exit(None if status == 200 else f"HTTP {status} on port {port}")
