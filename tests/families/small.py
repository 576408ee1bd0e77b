"""The families of the small sweep, which is part of ``make test``: diverse ones, and all that were once wrong."""

SMALL = (
    "kimi_linear",
    "bailing_hybrid",
    "glm5_next",
    "qwen4_exp",
    "minimax_m3_vl",
    "qwen3_vl_moe",
    "lara_mini",
    "inkling2",
    "ernie4_5_vl_moe",
    "muse_spark",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v4",
    "hy_v4",
    "qwen3_5_moe",
)
