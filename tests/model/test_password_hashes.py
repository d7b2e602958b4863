"""Accounts: a password exists only as a salted hash, and is never printed."""

from hashlib import scrypt

from kvcm.model.accounts import Account, AccountRole, PasswordHash

PASSWORD = "correct horse 鍵"


def test_a_hash_matches_its_password_only() -> None:
    hashed = PasswordHash.of(PASSWORD)
    assert hashed.matches(PASSWORD)
    assert not hashed.matches(PASSWORD + " ")
    assert not hashed.matches("")


def test_a_hash_is_scrypt_with_its_salt() -> None:
    salt = bytes(range(16))
    assert PasswordHash.of(PASSWORD, salt).digest == scrypt(PASSWORD.encode(), salt=salt, n=16384, r=8, p=1)


def test_every_hash_has_a_salt_of_its_own() -> None:
    first, second = PasswordHash.of(PASSWORD), PasswordHash.of(PASSWORD)
    assert first.salt != second.salt
    assert first.digest != second.digest
    assert len(first.salt) >= 16


def test_a_hash_never_contains_the_password() -> None:
    hashed = PasswordHash.of(PASSWORD)
    assert PASSWORD.encode() not in hashed.salt + hashed.digest


def test_nothing_secret_is_printed() -> None:
    hashed = PasswordHash.of(PASSWORD)
    account = Account("admin", AccountRole.ROLE_ADMIN, hashed)
    for text in (repr(hashed), str(hashed), repr(account), str(account), f"{hashed}"):
        assert PASSWORD not in text
        for secret in (hashed.salt, hashed.digest):
            assert secret.hex() not in text
            assert repr(secret)[2:-1] not in text
    assert "admin" in repr(account)
