"""What is asked: real questions with long answers, each made fresh by a number in front.

The number makes a prompt differ from every earlier one right behind the system prompt, so that no prefix
cache knows more than that; its width is fixed, so that prompts of one question have equally many tokens.
"""

from __future__ import annotations

import json

QUESTIONS = (
    "Why is the sky blue at noon and red in the evening?",
    "How does a bicycle stay upright while it is moving?",
    "Write a long story about a lighthouse keeper who finds a message in a bottle.",
    "Explain to a child how a refrigerator keeps food cold.",
    "What should I see in Rome when I have three days and like old buildings?",
    "Describe step by step how bread is baked, from flour to crust.",
    "What were the main causes of the French Revolution?",
    "How do vaccines teach the body to recognise a virus?",
    "Compare the life of a farmer two hundred years ago with the life of one today.",
    "How does a compiler turn a program into machine code?",
    "Give advice to someone who starts running at the age of forty.",
    "What happens inside a star from its birth to its end?",
)

# Stored, and asked in other words.
PARAPHRASES = (
    ("What is the capital of France?", "what's the capital of France"),
    ("Who wrote Pride and Prejudice?", "who wrote pride and prejudice"),
    ("What is the boiling point of water?", "what's the boiling point of water"),
    ("How do I reset my password?", "how do i reset my password"),
)


def fresh_question(index: int, number: int) -> str:
    """The question of `index` (any whole number), fresh for every `number` below a million."""
    return f"{number:06d}. {QUESTIONS[index % len(QUESTIONS)]}"


def script(text: str, first_token_ms: float, itl_ms: float, number: int) -> str:
    """A prompt that tells the scripted engine what to answer and when; `number` as in `fresh_question`."""
    orders = {"text": text, "first_token_ms": first_token_ms, "itl_ms": itl_ms}
    return f"{number:06d}. #script {json.dumps(orders)}"
