"""Make the authority of a cluster and the certificates of its nodes, for mutual TLS."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hiddenlab.errors import InputError

VALID = datetime.timedelta(days=365)
SKEW = datetime.timedelta(hours=1)  # clocks of machines may differ so much
LOCAL = ("127.0.0.1", "localhost")  # names under which a machine calls itself

Pair = tuple[bytes, bytes]  # certificate and private key, both PEM


def make_authority() -> Pair:
    """Make the authority that signs the certificates of one cluster.

    Returns:
        Its certificate and its private key, as PEM. Who has the key can join the cluster.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hiddenlab cluster")])
    usage = _usage(key_cert_sign=True, crl_sign=True)
    builder = _builder(name, name, key.public_key(), key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _signed(builder.add_extension(usage, critical=True), key, key)


def make_certificate(authority: Pair, host: str) -> Pair:
    """Make the certificate of a node, for its address and for 127.0.0.1 and localhost.

    Args:
        authority: certificate and key of the cluster's authority, as PEM.
        host: address or name of the node.

    Returns:
        Its certificate and its private key, as PEM.

    Raises:
        InputError: the authority's files are damaged, do not belong together, or have expired.
    """
    try:
        issuer = x509.load_pem_x509_certificate(authority[0])
        signer = serialization.load_pem_private_key(authority[1], None)
        issuer.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise InputError(f"the cluster's authority cannot be read ({error}); copy its files again") from None
    if not isinstance(signer, ec.EllipticCurvePrivateKey) or signer.public_key() != issuer.public_key():
        raise InputError("authority.pem and authority.key do not belong together; copy both again")
    if issuer.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        raise InputError(
            f"the cluster's authority expired on {issuer.not_valid_after_utc:%Y-%m-%d}; start the cluster anew in an "
            "empty folder"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
    names = [_alternative(one) for one in dict.fromkeys((host, *LOCAL))]
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = (
        _builder(name, issuer.subject, key.public_key(), signer.public_key(), issuer.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(both, critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
    return _signed(builder, key, signer)


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(**given: bool) -> x509.KeyUsage:
    kinds = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{kind: given.get(kind, False) for kind in kinds})


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePublicKey,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(min(now + VALID, latest or now + VALID))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> Pair:
    pem = serialization.Encoding.PEM
    certificate = builder.sign(signer, hashes.SHA256()).public_bytes(pem)
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate, private
