"""Training on many devices, started by torchrun; one `[mesh]` section of the recipe says how (report §5.2).

| file | what |
|---|---|
| `config` `devices` `boxes` | the section, the ranks, where every parameter's elements lie |
| `tokens` `sequence` `tensors` `routed` | which tokens a rank has; context, tensor and expert parallelism |
| `stage` `pipeline` | a part of the layers, and how micro-batches pass through the parts |
| `model` `groups` `activations` | a rank's part, which parameters are gathered when, what becomes of saved tensors |
| `optimizer` `places` `store` `trainer` `watch` | a step over shards, checkpoints of all ranks, the run, who is alive |
"""
