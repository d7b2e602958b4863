"""What the connectors rely on in each engine, as in the versions that `.ci/engines` pins.

An engine that changes any of it must fail a test that names it, not a request of a user. The tests that run
an engine try the calls into it and their parameters.
"""

from __future__ import annotations

ATTRIBUTES = {
    "vllm": {
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": """
            _get_connector_metadata requires_kv_delivery role register_kv_caches start_load_kv wait_for_layer_load
            save_kv_layer wait_for_save get_transfer_results get_block_ids_with_load_errors
            build_connector_worker_meta shutdown get_num_new_matched_tokens update_state_after_alloc
            build_connector_meta on_new_request update_connector_output request_finished bind_gpu_block_pool
            take_events reset_cache get_kv_connector_stats build_kv_connector_stats build_prom_metrics
            get_external_cache_hit_sources requires_piecewise_for_cudagraph
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
