"""Backends as processes: started on first use, monitored, restarted, unloaded, never orphaned.

No process gets a session of its own. Linux schedules each session as a group (autogroup), with a
weight per processor that follows the group's load there. A thread that seldom runs, such as the
thread that writes a stream, then waited up to 0.3 s for a processor beside two busy sessions. In
one session, on two cores, the longest pause of a stream fell from 338 to 31 ms beside 2,048
embeddings, and from 368 to 39 ms while two models answered four requests each.
"""
