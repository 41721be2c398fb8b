"""From the reference in a load request to a model in memory.

A load reads the new model while the old one still serves, and replaces it in the last stage. So a
load that fails, or whose caller has disconnected, changes nothing, but memory must hold both models
for a moment. The longest pause of a running stream is the slowest single stage, such as one large
array or the trial image of a vision model. What the first answers do not need (the token table of
grammars, longer warm-up prompts on a GPU) is done stage by stage once no command has come for a
second.
"""
