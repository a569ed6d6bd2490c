"""Kernels and their references: a leaf, installable alone (`pip install perilune[ops]`), one file a mechanism.

Import what you use from its module; this package imports nothing, so a reader of one mechanism pays for no other.

| module | public names | equation |
|---|---|---|
| `ops.kda` | `kda`, `kda_step`, `log_decay` | Kimi Delta Attention, report §2.1.1 |
| `ops.kda.decode` | `decode`, `Drafts` | its decoding step in place, §5.4.2 |
| `ops.conv` | `short_conv`, `short_convs` | depthwise causal conv + SiLU with tails |
| `ops.attnres` | `mix`, `mix_ahead`, `merge`, `probabilities` | Block Attention Residuals, §2.2 |
| `ops.attention` | `attention` | MLA's softmax attention, fp32 output in training, §2.1.2 |
| `ops.mla` | `mla_decode` | absorbed MLA over pages, §5.4.2 |
| `ops.router` | `route`, `router_scores`, `select`, `mixture` | who is chosen, with what weight, §2.3.3 |
| `ops.experts` | `experts`, `grouped_mlp`, `order_rows`, `Activation` | grouped expert MLP, §5.2.2 |
| `ops.linear` | `linear`, `pair` | products of one row, §5.4.2 |
| `ops.packed` | `packed_experts`, `Packed` | experts of a decoding step from packed MXFP4, §5.4.2 |
| `ops.situ` | `situ_glu`, `swiglu`, `packed_glu` | SiTU-GLU, §2.3.2 |
| `ops.quantile` | `margin_histogram`, `histogram_quantile`, `exact_quantile`, `alternating_solver` | the bias, §2.3.3 |
| `ops.mx` | `pack_mxfp4`, `unpack_mxfp4`, `round_mxfp4`, `round_mxfp8` | OCP microscaling formats |
| `ops.norm` | `rms_norm`, `gated_rms_norm`, `sigmoid_gate` | norms and output gates |
| `ops.cross_entropy` | `linear_cross_entropy` | the head and its loss by chunks |
| `ops.memory` | `keep_freed_memory` | a program's setting for CPU speed |

Each fast path has its equation beside it (`*_reference`; `impl="reference"` of `kda`), tested for values and
gradients; `dispatch` says which one runs.
"""
