"""The Mooncake pool: its master, its manifest, what each rank lent to it, and the client that engines use.

    remote.PoolClient ── socketpair + shared staging ── agent (own process) ── client.StoreHandle ── mooncake.store

Only `client` imports the vendor's package, and only the agent process and the commands run it: several of its calls
abort, segfault or hold the GIL for seconds.
"""
