"""Decides which sequences run, how long a pass is, and what is stored, evicted and preempted.

The package is plain Python without MLX. Each question has a module that answers it:

- How many bytes does a sequence, a pass or a cached prefix need? `charges`
- From where is the KV of a prompt's first tokens copied? `stored_entries`
- Which prompts does a step prefill, and how many tokens of each? `prefill_turns`
- How long does a pass take, and how long may it take? `pace`
- When do completed prompts wait for others, before they decode? `burst`
- How many draft tokens does a step check? `draft_width`
- Which sequences pause because their grammars take too much time? `mask_share`
- When are sequences preempted for texts to embed? `text_turn`

`planner` calls these modules, admits and preempts sequences, and forms batches. Its state is in two
tables: `sequence_state` for sequences, and `stored_entries` for cached prefixes.
"""
