"""An inference engine that speaks SGLang's wire over any Hugging Face causal language model, on CPU or GPU.

From the outside in: `server` (settings, process), `assembly` (puts it together), `app` (HTTP), `wire` (bodies), `core`
(the torch thread), `scheduler` and `prefix_cache` (pure), `runner`, `model`, `kv_cache`, `sampler`, `weights` (torch),
`selfcheck` (run before serving). `sequence` is what all of them pass around.
"""
