"""What of two questions' writing keeps them apart: signs, code, capitals, accents, articles, and whose it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cache.guards import rejecting_guard
from orchestrator.cache.writing import rejecting_writing


@pytest.mark.parametrize(
    ("cached", "asked", "guard"),
    [
        ("What is -5 plus 3?", "What is 5 plus 3?", "identifier"),
        ("What is 10² in words?", "What is 102 in words?", "identifier"),
        ("What's the difference between == and = in Python?", "What's the difference between == and is in Python?", ""),
        ("What does a && b mean in bash?", "What does a & b mean in bash?", "identifier"),
        ("What does print(a[1:]) show?", "What does print(a[:1]) show?", "identifier"),
        ("What does ! mean in JavaScript?", "What does !! mean in JavaScript?", "identifier"),
        ("What does $? mean in bash?", "What does $! mean in bash?", "identifier"),
        ("In SQL, what does LIKE 'an%' match?", "In SQL, what does LIKE '%an' match?", "words"),
        ("What does ls -l . do?", "What does ls -l .. do?", "identifier"),
        ("What speed is 100 Mbps good for?", "What speed is 100 MBps good for?", "identifier"),
        ("Is 5 mW enough?", "Is 5 MW enough?", "identifier"),
        ("What does 20 kb/s mean?", "What does 20 kB/s mean?", "identifier"),
        ("How do I polish shoes?", "How do I get Polish shoes?", "name"),
        ("How do I cook turkey?", "How do I cook in Turkey?", "name"),
        ("Is AIDS deadly?", "Is aids deadly?", "name"),
        ("Who is the US president?", "Who is president of us?", "name"),
        ("How do I swim in Cold Lake?", "How do I swim in a cold lake?", "name"),
        ("Which countries border France and Germany?", "Which countries border France or Germany?", "scope"),
        ("Which bank pays the highest interest?", "Which bank pays high interest?", "superlative"),
        ("Who would win the election?", "Who won the election?", "modality"),
        ("Who wins the cup?", "Who won the cup?", ""),
        ("Where is the principal?", "Where is the principle?", "words"),
        ("How do I draw a gun?", "How do I draw with a gun?", "roles"),
        ("Can I see my medical records?", "Can I see her medical records?", "roles"),
        ("¿Cómo se cocina la papa?", "¿Cómo cocina el papá?", ""),
        ("¿Quién ganará la copa?", "¿Quién ganó la copa?", ""),
        ("Wurde das Tempolimit eingeführt?", "Wird das Tempolimit eingeführt?", "tense"),
        ("Ist es schon warm in Rom?", "Ist es schön warm in Rom?", "words"),
        ("Wie drucke ich ein Foto?", "Wie drücke ich ein Foto?", "words"),
        ("What does 👍 mean?", "What does 👎 mean?", "identifier"),
        ("What does :) mean?", "What does :( mean?", "identifier"),
        ("What does ≤ mean?", "What does ≥ mean?", "identifier"),
        ("Translate into Spanish: the dog", "Translate into Spanish: a dog", "words"),
        ("What's wrong with this sentence: he go", "What's wrong with this sentence: he goes", "words"),
        ('What tense is "I walk"?', 'What tense is "I walked"?', "words"),
        ("What is the plural of mouse?", "What is the plural of mice?", "words"),
        ("Jak włączyć tryb ciemny?", "Jak wyłączyć tryb ciemny?", "language"),
        ("Quem comprou a casa?", "Quem compro a casa?", ""),
        ("Wer besiegte Napoleon?", "Wen besiegte Napoleon?", "roles"),
        ("¿Es este medicamento más fuerte?", "¿Es este medicamento el más fuerte?", "superlative"),
        ("Combien gagne un médecin ?", "Combien gagnait un médecin ?", ""),
        ("Was wissen sie über mich?", "Was wissen Sie über mich?", "name"),
        ("100Mb等于多少KB?", "100MB等于多少KB?", "identifier"),
        ("命令 ls -r 是什么作用?", "命令 ls -R 是什么作用?", "identifier"),
        ("Was ist das Steuer?", "Was ist die Steuer?", "name"),
        ("Comment préparer le poisson ?", "Comment préparer le poison ?", "words"),
        ("Comment pêcher en mer ?", "Comment pécher en mer ?", "words"),
        ("Est-il légal de filmer la police ?", "Est-il illégal de filmer la police ?", "words"),
        ("Où est la tour ?", "Où est le tour ?", "name"),
        ("What is 2 + 3 * 4?", "What is (2 + 3) * 4?", "identifier"),
        ("Was ist 2 mal (3 plus 4)?", "Was ist (2 mal 3) plus 4?", "identifier"),
        ("Is not (True and False) true?", "Is not True and False true?", "identifier"),
        ("Was macht der Operator ?? in C#?", "Was macht der Operator ?. in C#?", "identifier"),
        ("Que fait le signe ?? dans le code ?", "Que fait le signe ?: dans le code ?", "identifier"),
        ("C#里的 ?? 是什么意思?", "C#里的 ?. 是什么意思?", "identifier"),
        ("What does a?.b mean?", "What does a??b mean?", "identifier"),
        ("What does ; mean in bash?", "What does : mean in bash?", "identifier"),
        ("IS 5 MW OF POWER ENOUGH?", "Is 5 mW of power enough?", "identifier"),
        ("WHAT DOES LS -R DO HERE?", "what does ls -r do here?", "identifier"),
    ],
)
def test_what_is_written_otherwise_is_asked_otherwise(cached: str, asked: str, guard: str) -> None:
    found = rejecting_guard(cached, asked)
    assert found is not None and rejecting_guard(asked, cached) is not None
    assert guard in ("", found)


@pytest.mark.parametrize(
    ("cached", "asked"),
    [
        ("How do I sort a list in Python?", "how do i sort a list in python"),
        ("Who was Albert Einstein?", "who was albert einstein"),
        ("How Do I Reset My Password?", "How do I reset my password?"),
        ("How do I convert 5 km to miles?", "how do i convert 5 KM to miles"),
        ('How do you say "good morning" in Spanish?', "how do you say good morning in spanish"),
        ("Would anyone be able to tell me how I pay?", "How do I pay?"),
        ("What is the capital of France?", "what's the capital of France"),
        ("¿Cómo reservo un hotel en Málaga?", "como reservo un hotel en malaga"),
        ("Wie öffne ich ein Konto?", "wie offne ich ein konto"),
        ("Comment réparer une fenêtre ?", "comment reparer une fenetre"),
        ("How tall is Mount Kilimanjaro?", "HOW TALL IS MOUNT KILIMANJARO"),
        ("What is a CPU (in short words)?", "What is a CPU, in short words?"),
        ("How do I pay??", "How do I pay?!"),
        ("How do I find a part-time job (in Rome)?", "How do I find a part-time job in Rome?"),
        ("Comment payer par carte ??", "comment payer par carte ?"),
        ("What is the plural of octopus?", "what is the plural of 'octopus'?"),
    ],
)
def test_how_people_write_the_same(cached: str, asked: str) -> None:
    assert rejecting_guard(cached, asked) is None
    assert rejecting_guard(asked, cached) is None


@given(st.text(max_size=80), st.text(max_size=80), st.sampled_from(["en", "de", "es", "fr", "zh"]))
def test_the_order_of_two_questions_does_not_matter(one: str, other: str, language: str) -> None:
    assert (rejecting_writing(one, other, language) is None) == (rejecting_writing(other, one, language) is None)
    assert rejecting_writing(one, one, language) is None
