"""LongBench's twenty-one data sets: prompts, lengths of answers, metrics (Bai et al. 2024, ACL, table 1).

Prompts have to be the benchmark's own, word for word, for scores to compare; they are by THU-KEG and Zhipu AI (MIT).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Metric = Literal["f1", "f1_zh", "rouge", "rouge_zh", "classes", "count", "paragraph", "paragraph_zh", "code"]


@dataclass(frozen=True)
class DataSet:
    """One of the data sets.

    before, after: the prompt around the context; `{input}` is the row's. new_tokens: of an answer. few_shot: solved
    examples in the context: the answer is its first line. plain: no chat template is used.
    """

    before: str
    after: str
    new_tokens: int
    metric: Metric
    few_shot: bool = False
    plain: bool = False


DATA_SETS: dict[str, DataSet] = {
    "narrativeqa": DataSet(
        (
            "You are given a story, which can be either a novel or a movie script, and a question. "
            "Answer the question asconcisely as you can, using a single phrase if possible. "
            "Do not provide any explanation.\n\nStory: "
        ),
        (
            "\n\nNow, answer the question based on the story asconcisely as you can, "
            "using a single phrase if possible. Do not provide any explanation.\n\nQuestion: {input}\n\n"
            "Answer:"
        ),
        128,
        "f1",
    ),
    "qasper": DataSet(
        (
            "You are given a scientific article and a question. "
            "Answer the question as concisely as you can, using a single phrase or sentence if possible. "
            "If the question cannot be answered based on the information in the article, "
            'write "unanswerable". If the question is a yes/no question, answer "yes", "no", '
            'or "unanswerable". Do not provide any explanation.\n\nArticle: '
        ),
        (
            "\n\n Answer the question based on the above article as concisely as you can, "
            "using a single phrase or sentence if possible. "
            "If the question cannot be answered based on the information in the article, "
            'write "unanswerable". If the question is a yes/no question, answer "yes", "no", '
            'or "unanswerable". Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:'
        ),
        128,
        "f1",
    ),
    "multifieldqa_en": DataSet(
        "Read the following text and answer briefly.\n\n",
        (
            "\n\nNow, answer the following question based on the above text, "
            "only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
        ),
        64,
        "f1",
    ),
    "multifieldqa_zh": DataSet(
        "阅读以下文字并用中文简短回答：\n\n",
        ("\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答："),
        64,
        "f1_zh",
    ),
    "hotpotqa": DataSet(
        (
            "Answer the question based on the given passages. "
            "Only give me the answer and do not output any other words.\n\n"
            "The following are given passages.\n"
        ),
        (
            "\n\nAnswer the question based on the given passages. "
            "Only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
        ),
        32,
        "f1",
    ),
    "2wikimqa": DataSet(
        (
            "Answer the question based on the given passages. "
            "Only give me the answer and do not output any other words.\n\n"
            "The following are given passages.\n"
        ),
        (
            "\n\nAnswer the question based on the given passages. "
            "Only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
        ),
        32,
        "f1",
    ),
    "musique": DataSet(
        (
            "Answer the question based on the given passages. "
            "Only give me the answer and do not output any other words.\n\n"
            "The following are given passages.\n"
        ),
        (
            "\n\nAnswer the question based on the given passages. "
            "Only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
        ),
        32,
        "f1",
    ),
    "dureader": DataSet(
        "请基于给定的文章回答下述问题。\n\n文章：",
        "\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        "rouge_zh",
    ),
    "gov_report": DataSet(
        ("You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n"),
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge",
    ),
    "qmsum": DataSet(
        (
            "You are given a meeting transcript and a query containing a question or instruction. "
            "Answer the query in one or more sentences.\n\nTranscript:\n"
        ),
        (
            "\n\nNow, answer the query based on the above meeting transcript in one or more sentences.\n\n"
            "Query: {input}\nAnswer:"
        ),
        512,
        "rouge",
    ),
    "multi_news": DataSet(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n",
        "\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge",
    ),
    "vcsum": DataSet(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n",
        "\n\n会议总结：",
        512,
        "rouge_zh",
    ),
    "trec": DataSet(
        "Please determine the type of the question below. Here are some examples of questions.\n\n",
        "\n{input}",
        64,
        "classes",
        few_shot=True,
        plain=True,
    ),
    "triviaqa": DataSet(
        (
            "Answer the question based on the given passage. "
            "Only give me the answer and do not output any other words. The following are some examples."
            "\n\n"
        ),
        "\n\n{input}",
        32,
        "f1",
        few_shot=True,
        plain=True,
    ),
    "samsum": DataSet(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n",
        "\n\n{input}",
        128,
        "rouge",
        few_shot=True,
        plain=True,
    ),
    "lsht": DataSet(
        "请判断给定新闻的类别，下面是一些例子。\n\n",
        "\n{input}",
        64,
        "classes",
        few_shot=True,
        plain=True,
    ),
    "passage_count": DataSet(
        (
            "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
            "Please carefully read these paragraphs and determine how many unique paragraphs there are after removing duplicates. "
            "In other words, how many non-repeating paragraphs are there in total?\n\n"
        ),
        (
            "\n\nPlease enter the final count of unique paragraphs after removing duplicates. "
            "The output format should only contain the number, such as 1, 2, 3, and so on.\n\n"
            "The final answer is: "
        ),
        32,
        "count",
    ),
    "passage_retrieval_en": DataSet(
        (
            "Here are 30 paragraphs from Wikipedia, along with an abstract. "
            "Please determine which paragraph the abstract is from.\n\n"
        ),
        (
            "\n\nThe following is an abstract.\n\n{input}\n\n"
            "Please enter the number of the paragraph that the abstract is from. "
            'The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: '
        ),
        32,
        "paragraph",
    ),
    "passage_retrieval_zh": DataSet(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n",
        ('\n\n下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：'),
        32,
        "paragraph_zh",
    ),
    "lcc": DataSet(
        "Please complete the code given below. \n",
        "Next line of code:\n",
        64,
        "code",
        plain=True,
    ),
    "repobench-p": DataSet(
        "Please complete the code given below. \n",
        "{input}Next line of code:\n",
        64,
        "code",
        plain=True,
    ),
}
