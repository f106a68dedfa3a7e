# docker build -t east .
# docker run --gpus all -v "$PWD/results:/work/results" -v east-cache:/cache east dataset=cifar10 loss=f1
FROM pytorch/pytorch:2.6.0-cuda12.6-cudnn9-runtime

WORKDIR /opt/east
COPY pyproject.toml README.md LICENSE ./
COPY east east
COPY conf conf
RUN pip install --no-cache-dir ".[ray,tensorboard]"

ENV EAST_DATA_DIR=/cache
VOLUME /cache /work/results
WORKDIR /work
ENTRYPOINT ["east-run"]
