"""Reward functions as a project that trains with verl has them; nothing here knows jackfield."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of the solution's words that are the answer."""
    assert data_source == "copy"
    assert extra_info["split"] == "train"
    words = solution_str.split()
    return words.count(ground_truth) / max(len(words), 1)


def with_details(data_source, solution_str, ground_truth, extra_info=None, factor=1.0):
    return {
        "score": factor * len(solution_str),
        "acc": solution_str == ground_truth,
        "pred": solution_str,
        "turns": extra_info["num_turns"],
    }


async def asks(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(len(solution_str))


def whole_batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [{"score": float(s == t)} for s, t in zip(solution_strs, ground_truths, strict=True)]


def raises(data_source, solution_str, ground_truth, extra_info=None):
    raise ValueError(f"no score for {solution_str}")
