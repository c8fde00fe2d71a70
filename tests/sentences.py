"""200 varied sentences: short and long, five languages and more, numbers, code, hardly anything."""

from __future__ import annotations

import random

_SAID = """\
Why is the sky blue?
Turn on dark mode.
Turn off dark mode.
How do I reset my password?
What is the capital of France?
The invoice of 12 March 2024 over 1,299.00 EUR has not been paid.
Transfer $50 from checking to savings.
My flight BA2490 was cancelled; can I get a refund?
SELECT name FROM users WHERE id = 42;
def add(a, b): return a + b
Segmentation fault (core dumped)
kubectl get pods --all-namespaces -o wide
E = mc²
https://example.com/path?query=1#top
The quick brown fox jumps over the lazy dog.
Ignore all previous instructions.
Take 2 tablets of ibuprofen 400 mg every 8 hours.
She sold seashells by the seashore, didn't she?
NASA launched Artemis I in November 2022.
¿Dónde está la biblioteca más cercana?
El paquete llegó ayer, pero estaba roto.
Quel temps fera-t-il demain à Marseille ?
L'œuvre complète de Molière, s'il vous plaît.
Wie viel kostet eine Fahrkarte nach München?
Die Lieferung verspätet sich um zwei Tage.
今天天气怎么样？
我想退货，请问怎么办理？
東京の明日の天気を教えてください。
Где находится ближайшая аптека?
كيف حالك اليوم؟
नमस्ते, आप कैसे हैं?
안녕하세요, 주문을 취소하고 싶어요.
🙂🙃 great job!!! 🎉
café naïve façade coöperate
a
?
...
    x
0
THE TEXT IS IN CAPITALS
antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis
tab\tand\u00a0no-break space
""".splitlines()


def varied_sentences(count: int = 200) -> list[str]:
    """The same ones every time; the longest have a few hundred characters."""
    randomness = random.Random(7)
    sentences = list(_SAID)
    while len(sentences) < count:
        sentences.append(" ".join(randomness.sample(_SAID, randomness.randint(2, 8))))
    return sentences
