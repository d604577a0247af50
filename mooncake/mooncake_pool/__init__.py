"""The Mooncake pool: its master, its manifest, what each rank lent to it, and the client that engines use.

    remote.PoolClient ── reading, writing ── segments of this host, mapped (mapping)
            │                                      ▲ memfd, handed over by its holder (lending)
            └── link ── socketpair, staging slots ── agent (own process) ── client.StoreHandle ── mooncake.store

    master ── mooncake_master, pool.json, pool.samples.jsonl        report ── report_text | report_html | JSON

Only `client` imports the vendor's package, and only the agent process runs it: several of its calls abort, segfault or
hold the GIL for seconds. Between clients of one host no block passes through the vendor's transport: the master gives
out places, and the engines copy into and out of them, each value proving itself by its trailer. The vendor's own
same-host client (`mooncake_client` with dummy clients) would copy every block twice, and would own all capacity in one
process that is no rank's.
"""
