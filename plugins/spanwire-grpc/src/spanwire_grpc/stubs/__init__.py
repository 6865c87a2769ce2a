"""Message classes of the servers' schemas, in a pool of descriptors that nobody else sees.

Two copies of one protobuf package cannot live in the pool that all share, and ``inference`` is in tritonclient, kserve and
mlserver too. Nothing here is public: what is in these messages comes out as :class:`~spanwire.calls.Chunk`.
"""
