"""What the connectors rely on in each engine, as in the versions that `.ci/engines` pins.

An engine that changes any of it must fail a test that names it, not a request of a user. Parameters are without types,
and a default is `=…`. What is listed under `module:Class` are its methods.
"""

from __future__ import annotations

_VLLM_CALLS = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": """
        _get_connector_metadata(self)
    """,
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata": """
        aggregate(self, other)
    """,
    "vllm.distributed.kv_transfer.kv_connector.v1.base": """
        KVConnectorTransferResults(finished_sending=…, finished_recving=…, failed_recving=…)
    """,
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats": """
        aggregate(self, other)
        reduce(self)
        reset(self)
        is_empty(self)
    """,
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics": """
        __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues)
        observe(self, transfer_stats_data, engine_idx=…)
    """,
    "vllm.v1.core.block_pool:BlockPool": """
        touch(self, blocks)
        free_blocks(self, ordered_blocks)
    """,
    "vllm.v1.core.sched.output:KVConnectorBlockState": """
        get_block_ids(self, req_id)
    """,
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": """
        get_block_ids(self, allow_none=…, *, group_ids=…)
    """,
    "vllm.distributed.kv_events": """
        BlockStored(block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name,
            extra_keys=…, group_idx=…, kv_cache_spec_kind=…, kv_cache_spec_sliding_window=…, locality=…,
            ownership=…, session_id=…)
    """,
    "vllm.distributed.parallel_state": """
        get_tensor_model_parallel_rank()
    """,
    "vllm.v1.core.kv_cache_utils": """
        maybe_convert_block_hash(hash_bytes)
    """,
    "vllm.config:ModelConfig": """
        get_total_num_kv_heads(self)
    """,
}
_SGLANG_CALLS = {
    "sglang.srt.mem_cache.hicache_storage": """
        HiCacheStorageExtraInfo(prefix_keys=…, extra_info=…)
        PoolTransferResult(kv_hit_pages, extra_pool_hit_pages, restorable_prefix_pages=…)
        PoolTransfer(name, host_indices=…, device_indices=…, keys=…, hit_policy=…, nodes_to_load=…,
            indices_from_pool=…, block_pages=…, group_pages=…)
    """,
    "sglang.srt.mem_cache.storage.backend_factory:StorageBackendFactory": """
        create_backend(backend_name, storage_config, mem_pool_host, **kwargs)
    """,
    "sglang.srt.observability.metrics_collector": """
        StorageMetrics(prefetch_pgs=…, backup_pgs=…, prefetch_bandwidth=…, backup_bandwidth=…)
    """,
    "sglang.srt.runtime_context": """
        get_model()
        get_serving()
    """,
    "sglang.srt.mem_cache.utils": """
        get_hash_str(token_ids, prior_hash=…, page_size=…)
    """,
    "sglang.srt.mem_cache.pool_host.mha:MHATokenToKVPoolHost": """
        get_page_buffer_meta(self, indices)
    """,
}
_TRANSFORMERS_CALLS = {
    "transformers.cache_utils:CacheLayerMixin": """
        update(self, key_states, value_states, *args, **kwargs)
        lazy_initialization(self, key_states, value_states)
        get_seq_length(self)
        get_mask_sizes(self, query_length)
        get_max_cache_shape(self)
    """,
    "transformers.cache_utils:DynamicLayer": """
        update(self, key_states, value_states, *args, **kwargs)
        lazy_initialization(self, key_states, value_states)
        get_seq_length(self)
        get_mask_sizes(self, query_length)
    """,
    "transformers.cache_utils:DynamicSlidingWindowLayer": """
        __init__(self, sliding_window, **kwargs)
        update(self, key_states, value_states, *args, **kwargs)
    """,
    "transformers.cache_utils:Cache": """
        __init__(self, layers=…, layer_class_to_replicate=…, offloading=…, offload_only_non_sliding=…)
    """,
    "transformers.cache_utils:DynamicCache": """
        __init__(self, ddp_cache_data=…, config=…, offloading=…, offload_only_non_sliding=…)
    """,
    "transformers.cache_utils:LinearAttentionLayer": """
        __init__(self, number_of_states=…, **kwargs)
    """,
    "transformers:GenerationMixin": """
        generate(self, inputs=…, generation_config=…, logits_processor=…, stopping_criteria=…,
            prefix_allowed_tokens_fn=…, synced_gpus=…, assistant_model=…, streamer=…, negative_prompt_ids=…,
            negative_prompt_attention_mask=…, custom_generate=…, **kwargs)
    """,
    "transformers:StoppingCriteria": """
        __call__(self, input_ids, scores, **kwargs)
    """,
}

CALLS = {"vllm": _VLLM_CALLS, "sglang": _SGLANG_CALLS, "transformers": _TRANSFORMERS_CALLS}

ATTRIBUTES = {
    "vllm": {
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": """
            requires_kv_delivery role register_kv_caches start_load_kv wait_for_layer_load save_kv_layer wait_for_save
            get_transfer_results get_block_ids_with_load_errors build_connector_worker_meta shutdown
            get_num_new_matched_tokens update_state_after_alloc build_connector_meta on_new_request
            update_connector_output request_finished bind_gpu_block_pool take_events reset_cache
            get_kv_connector_stats build_kv_connector_stats build_prom_metrics get_external_cache_hit_sources
            requires_piecewise_for_cudagraph
        """,
        "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": "request_finished_all_groups",
        "vllm.v1.request:Request": """
            request_id block_hashes num_tokens num_computed_tokens num_in_flight_tokens all_token_ids lora_request
            cache_salt skip_reading_prefix_cache
        """,
        "vllm.v1.core.sched.output:SchedulerOutput": """
            num_scheduled_tokens total_num_scheduled_tokens preempted_req_ids finished_req_ids kv_connector_block_state
        """,
        "vllm.v1.core.block_pool:BlockPool": "blocks num_gpu_blocks",
        "vllm.v1.outputs:KVConnectorOutput": """
            finished_recving failed_recving invalid_block_ids kv_connector_worker_meta
        """,
        "vllm.v1.kv_cache_interface:KVCacheConfig": """
            kv_cache_groups num_blocks hash_block_size prefix_cacheable_group_ids
        """,
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "layer_names kv_cache_spec",
        "vllm.v1.kv_cache_interface:AttentionSpec": """
            block_size dtype head_size head_size_v num_heads state_content_size_bytes tokens_per_state
        """,
        "vllm.v1.kv_cache_interface:SlidingWindowSpec": "sliding_window",
        "vllm.v1.kv_cache_interface:FullAttentionSpec": "block_size",
        "vllm.v1.kv_cache_interface:MambaSpec": """
            block_size dtypes mamba_cache_mode shapes state_content_size_bytes tp_replicated
        """,
        "vllm.config:VllmConfig": """
            model_config parallel_config cache_config load_config kv_transfer_config kv_events_config
        """,
        "vllm.config:CacheConfig": "cache_dtype prefix_caching_hash_algo",
        "vllm.config:ModelConfig": "model revision seed dtype quantization hf_config use_mla",
        "vllm.config:ParallelConfig": """
            tensor_parallel_size pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size
        """,
        "vllm.config:LoadConfig": "load_format",
        "vllm.v1.kv_cache_interface:MLAAttentionSpec": "head_size",
        "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": "kv_cache_specs",
        "vllm.v1.metrics.cache_hit_source:CacheHitSource": "DEVICE HOST DISK EXTERNAL_UNSPECIFIED",
    },
    "sglang": {
        "sglang.srt.mem_cache.hicache_storage:HiCacheStorage": """
            register_mem_host_pool_v2 on_host_pools_registered batch_exists batch_get_v1 batch_set_v1 batch_exists_v2
            batch_get_v2 batch_set_v2 get batch_get set batch_set exists clear get_stats
        """,
        "sglang.srt.mem_cache.hicache_storage:HiCacheStorageConfig": """
            tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size dp_rank is_mla_model is_storage_writer
            enable_storage_metrics is_page_first_layout model_name should_split_heads extra_config
        """,
        "sglang.srt.mem_cache.pool_host.mha:MHATokenToKVPoolHost": """
            layout page_size layer_num start_layer target_layer_num head_num head_dim dtype kv_buffer
        """,
        "sglang.srt.mem_cache.hicache_storage:HiCacheStorageExtraInfo": "prefix_keys extra_info",
        "sglang.srt.mem_cache.hicache_storage:PoolTransfer": "name host_indices keys",
        "sglang.srt.mem_cache.hicache_storage:PoolName": "KV",
    },
    "transformers": {
        "transformers.cache_utils:Cache": "layers",
        "transformers.cache_utils:DynamicLayer": "keys values is_initialized is_sliding",
        "transformers.cache_utils:DynamicSlidingWindowLayer": "keys values sliding_window cumulative_length",
        "transformers.cache_utils:LinearAttentionLayer": """
            conv_states recurrent_states number_of_states has_previous_state
        """,
        "transformers:GenerationConfig": """
            max_new_tokens max_length return_dict_in_generate pad_token_id eos_token_id get_generation_mode update
        """,
    },
}

# A class of ours and the class of the engine that calls its methods: parameters of both are compared.
OVERRIDES = {
    "vllm": [
        (
            "kvcm.connectors.vllm.connector:KVCMConnector",
            "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
        ),
        (
            "kvcm.connectors.vllm.connector:KVCMConnector",
            "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA",
        ),
    ],
    "sglang": [("kvcm.connectors.sglang:KVCMStorage", "sglang.srt.mem_cache.hicache_storage:HiCacheStorage")],
    "transformers": [],
}
