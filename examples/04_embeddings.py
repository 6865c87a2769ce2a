"""Vectors in the order of the texts."""

import spanwire
from spanwire.testing import LoopbackServer

with LoopbackServer() as server, spanwire.SyncConnectionManager() as manager:
    found = manager.embed(server.endpoint(), spanwire.Call.embeddings("embedder", ["red", "green", "blue"]))
    for vector in found.vectors:
        print(len(vector), [round(number, 3) for number in vector[:3]])
    print(found.usage)
